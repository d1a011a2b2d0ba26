// Blocks of HTML, of which the last ones are replaced while the text grows.
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
        block.setHTML(html); // sanitises, see NiceGUI's index.html
        for (const link of block.querySelectorAll("a")) link.target = "_blank"; // which the sanitiser takes away
        this.$el.append(block);
      }
    },
  },
};
