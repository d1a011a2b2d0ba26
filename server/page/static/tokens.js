// Tokens as boxes. What a model wrote comes into the page as text only.
export default {
  template: `<div class="tokens probability" role="listbox" aria-label="Tokens" aria-orientation="horizontal"
    @click="click" @keydown="key"></div>`,
  methods: {
    append(tokens) {
      const boxes = document.createDocumentFragment();
      for (const [text, probability, source] of tokens) {
        const box = document.createElement("span");
        const isBytes = text.startsWith("bytes:");
        box.className = `token source-${source}`;
        box.setAttribute("role", "option");
        box.setAttribute("aria-selected", "false");
        box.tabIndex = this.$el.children.length || boxes.children.length ? -1 : 0;
        box.title = `${isBytes ? text : JSON.stringify(text)}, ${(100 * probability).toFixed(1)} %`;
        box.style.setProperty("--surprise", `${(100 * (1 - probability)).toFixed(0)}%`);
        box.textContent = isBytes ? "\uFFFD" : text.replaceAll("\n", "↵\n") || "∅";
        boxes.append(box);
      }
      this.$el.append(boxes);
    },
    clear() {
      this.$el.replaceChildren();
    },
    colourBy(what) {
      this.$el.classList.toggle("probability", what === "probability");
      this.$el.classList.toggle("source", what === "source");
    },
    click(event) {
      const box = event.target.closest(".token");
      if (box) this.choose(box);
    },
    key(event) {
      const boxes = this.$el.children;
      const at = Array.prototype.indexOf.call(boxes, document.activeElement);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: boxes.length - 1 }[event.key];
      if (at < 0 || to === undefined || !boxes[to]) return;
      event.preventDefault();
      this.choose(boxes[to]);
    },
    choose(box) {
      const before = this.$el.querySelector('[aria-selected="true"]') || this.$el.querySelector('[tabindex="0"]');
      if (before) {
        before.setAttribute("aria-selected", "false");
        before.tabIndex = -1;
      }
      box.setAttribute("aria-selected", "true");
      box.tabIndex = 0;
      box.focus();
      this.$emit("chosen", Array.prototype.indexOf.call(this.$el.children, box));
    },
  },
};
