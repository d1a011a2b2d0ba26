// Tokens as boxes in reading order. The arrow keys move between them; Enter or a click selects one.
const visible = (text) =>
  text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t").replace(/^ +| +$/g, (blanks) => "·".repeat(blanks.length)) || "∅";

export default {
  template: `<div class="tokens" role="listbox" aria-label="Tokens of the answer" @click="click" @keydown="press"></div>`,
  mounted() {
    this.boxes = [];
    this.current = 0;
    this.$emit("ready");
  },
  methods: {
    append(rows) {
      const added = document.createDocumentFragment();
      for (const [text, surprise, said, colour] of rows) {
        const breaks = text.match(/\n*$/)[0];
        const box = document.createElement("span");
        box.className = `token source-${colour}`;
        box.style.setProperty("--surprise", surprise);
        box.textContent = visible(text).replace(/\n+$/, "");
        box.title = said;
        box.setAttribute("role", "option");
        box.setAttribute("aria-selected", "false");
        box.setAttribute("aria-label", `${text.trim() || visible(text)}, ${said}`);
        box.tabIndex = this.boxes.length === this.current ? 0 : -1;
        box.place = this.boxes.push(box) - 1;
        added.append(box, breaks && "\n"); // a line break goes between the boxes, so that no box is split
      }
      this.$el.append(added);
    },
    empty() {
      this.$el.replaceChildren();
      this.boxes = [];
      this.current = 0;
    },
    click(event) {
      const box = event.target.closest(".token");
      if (box) this.choose(box.place);
    },
    press(event) {
      const last = this.boxes.length - 1;
      const at = this.current;
      const places = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last };
      if (event.key === "Enter" || event.key === " ") this.choose(at);
      else if (event.key === "ArrowDown") this.lead(this.nextLine(1));
      else if (event.key === "ArrowUp") this.lead(this.nextLine(-1));
      else if (event.key in places) this.lead(Math.min(last, Math.max(0, places[event.key])));
      else return;
      event.preventDefault();
    },
    nextLine(step) {
      // The nearest box in the next (1) or previous (-1) line.
      const here = this.boxes[this.current].getBoundingClientRect();
      let found = this.current;
      let line = null;
      for (let at = this.current + step; this.boxes[at]; at += step) {
        const there = this.boxes[at].getBoundingClientRect();
        if (Math.abs(there.top - here.top) < here.height / 2) continue;
        line ??= there.top;
        if (Math.abs(there.top - line) > here.height / 2) break;
        const isNearer = Math.abs(there.left - here.left) < Math.abs(this.boxes[found].getBoundingClientRect().left - here.left);
        if (found === this.current || isNearer) found = at;
      }
      return found;
    },
    lead(place) {
      this.boxes[this.current].tabIndex = -1;
      this.current = place;
      this.boxes[place].tabIndex = 0;
      this.boxes[place].focus();
    },
    choose(place) {
      for (const chosen of this.$el.querySelectorAll("[aria-selected=true]")) chosen.setAttribute("aria-selected", "false");
      this.boxes[place].setAttribute("aria-selected", "true");
      this.lead(place);
      this.$emit("choose", place);
    },
  },
};
