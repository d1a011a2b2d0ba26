// Answers side by side. CSS highlights mark differences from the first answer without changing the DOM.
const MARKS = ["parting", "parted"];

function textOf(answer) {
  const walker = document.createTreeWalker(answer, NodeFilter.SHOW_TEXT);
  const nodes = [];
  let text = "";
  while (walker.nextNode()) {
    nodes.push({ node: walker.currentNode, start: text.length });
    text += walker.currentNode.data;
  }
  return { nodes, text };
}

function parting(one, other) {
  let at = 0;
  while (at < one.length && one[at] === other[at]) at++;
  return at;
}

function range({ nodes }, start, end) {
  const place = (at) => {
    const found = nodes.findLast((one) => one.start <= at);
    return [found.node, Math.min(at - found.start, found.node.length)];
  };
  const made = new Range();
  made.setStart(...place(start));
  made.setEnd(...place(end));
  return made;
}

export default {
  template: "<div><slot></slot></div>",
  methods: {
    mark() {
      this.unmark();
      if (!globalThis.Highlight) return; // the text below each answer also reports the difference
      const [first, ...others] = [...this.$el.querySelectorAll(".answer > .body > .prose")].map(textOf);
      if (!first?.text) return;
      for (const name of MARKS) if (!CSS.highlights.has(name)) CSS.highlights.set(name, new Highlight());
      for (const other of others) {
        const at = parting(other.text, first.text);
        if (at >= other.text.length) continue;
        const word = other.text.slice(at).match(/^\s*\S+/)?.[0].length ?? 1;
        this.add("parting", range(other, at, at + word));
        this.add("parted", range(other, at + word, other.text.length));
      }
    },
    unmark() {
      for (const [name, made] of this.made ?? []) CSS.highlights.get(name)?.delete(made);
      this.made = [];
    },
    add(name, made) {
      CSS.highlights.get(name).add(made);
      this.made.push([name, made]);
    },
  },
  unmounted() {
    this.unmark();
  },
};
