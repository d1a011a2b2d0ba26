// Blocks of HTML; the last ones are replaced while the text grows.
export default {
  template: "<div></div>",
  mounted() {
    this.$emit("ready");
  },
  methods: {
    show(start, blocks) {
      while (this.$el.children.length > start) this.$el.lastElementChild.remove();
      for (const html of blocks) {
        const block = document.createElement("div");
        block.setHTML(html); // sanitises the HTML; NiceGUI's index.html has a polyfill
        for (const link of block.querySelectorAll("a")) link.target = "_blank"; // the sanitiser removes `target`
        this.$el.append(block);
      }
    },
  },
};
