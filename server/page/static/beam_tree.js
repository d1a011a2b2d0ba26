// Beams as a tree with one item per branch, and the usual keyboard navigation of trees.
function make(name, className, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function written(text) {
  // Line breaks are tokens, so they are made visible.
  const place = make("span", "written");
  text.split("\n").forEach((line, at) => {
    if (at) place.append(make("span", "break", "↵"), "\n");
    place.append(line);
  });
  return place;
}

// `parts`: whether the branch has siblings.
function item(branch, level, parts) {
  const row = make("div", "branch");
  if (branch.share && parts) row.append(make("span", "share", branch.share));
  row.append(written(branch.text));
  for (const beam of branch.ending) {
    const end = make("span", "beam");
    end.append(make("span", "beam-name", beam.name), make("span", "beam-facts", beam.facts));
    row.append(end);
  }
  const place = make("li", branch.best ? "best" : "");
  place.setAttribute("role", "treeitem");
  place.setAttribute("aria-level", level);
  place.setAttribute("aria-label", spoken(branch, parts));
  place.tabIndex = -1;
  place.append(row);
  if (branch.branches.length) {
    place.setAttribute("aria-expanded", "true");
    place.append(group(branch.branches, level + 1));
  }
  return place;
}

function group(branches, level) {
  const place = make("ul");
  place.setAttribute("role", "group");
  branches.forEach((branch, at) => {
    const one = item(branch, level, true);
    one.setAttribute("aria-posinset", at + 1);
    one.setAttribute("aria-setsize", branches.length);
    place.append(one);
  });
  return place;
}

function spoken(branch, parts) {
  const ends = branch.ending.map((beam) => `${beam.name}: ${beam.facts}`);
  const best = branch.best ? ["on the best beam's path"] : [];
  const share = branch.share && parts ? [branch.share] : [];
  return [branch.text.trim() || "nothing", ...share, branch.through, ...best, ...ends].join(", ");
}

export default {
  template: "<div></div>",
  methods: {
    show(tree) {
      this.$el.replaceChildren();
      if (!tree) return;
      const root = make("ul");
      root.setAttribute("role", "tree");
      root.setAttribute("aria-label", "Beams");
      // Without a common beginning, each branch is a root.
      const hasStem = tree.text || tree.ending.length;
      const trunks = hasStem ? [tree] : tree.branches;
      trunks.forEach((branch) => root.append(item(branch, 1, !hasStem)));
      root.firstElementChild.tabIndex = 0;
      root.addEventListener("keydown", (event) => this.go(event));
      root.addEventListener("click", (event) => this.click(event));
      this.$el.append(root);
    },
    go(event) {
      const at = event.target.closest("[role=treeitem]");
      const shown = [...this.$el.querySelectorAll("[role=treeitem]")].filter((one) => one.offsetParent);
      const index = shown.indexOf(at);
      const isOpen = at.getAttribute("aria-expanded") === "true";
      const parent = at.parentElement.closest("[role=treeitem]");
      const moves = {
        ArrowDown: () => this.focus(shown[index + 1]),
        ArrowUp: () => this.focus(shown[index - 1]),
        Home: () => this.focus(shown[0]),
        End: () => this.focus(shown.at(-1)),
        ArrowRight: () => (isOpen ? this.focus(shown[index + 1]) : this.open(at, true)),
        ArrowLeft: () => (isOpen ? this.open(at, false) : this.focus(parent)),
      };
      if (!moves[event.key] || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      moves[event.key]();
    },
    click(event) {
      const at = event.target.closest("[role=treeitem]");
      if (!at || getSelection().toString()) return;
      this.focus(at);
      this.open(at, at.getAttribute("aria-expanded") === "false");
    },
    open(at, isOpen) {
      if (at.hasAttribute("aria-expanded")) at.setAttribute("aria-expanded", isOpen);
    },
    focus(at) {
      if (!at) return;
      for (const one of this.$el.querySelectorAll("[tabindex='0']")) one.tabIndex = -1;
      at.tabIndex = 0;
      at.focus();
    },
  },
};
