// The last requests. What is in a row is asked for when it is opened, and again while the request runs.
export default {
  template: `
  <section v-if="rows" class="card requests">
    <h2>Your last requests</h2>
    <ul class="legend" aria-hidden="true">
      <li v-for="name in phases" :key="name"><i :class="name"></i>{{ name }}</li>
    </ul>
    <p v-if="!rows.length" class="quiet">None yet, with this key.</p>
    <div v-else class="scroll" role="region" tabindex="0" aria-label="Your last requests">
      <p v-if="newer" class="quiet">{{ newer }} newer, shown when all rows are closed.</p>
      <table>
        <thead>
          <tr>
            <th scope="col">Time</th><th scope="col">Endpoint</th><th scope="col">Outcome</th>
            <th scope="col" class="number">Tokens in</th><th scope="col" class="number">Out</th>
            <th scope="col" class="number">First token</th><th scope="col" class="number">Total</th>
            <th scope="col" class="where">Where the time went</th>
          </tr>
        </thead>
        <tbody>
          <template v-for="row in rows" :key="row.id">
            <tr>
              <th scope="row">
                <button type="button" class="opener" :aria-expanded="String(row.id in opened)" @click="toggle(row.id)">
                  <span class="arrow" aria-hidden="true"></span>{{ time(row.started_at) }}
                </button>
              </th>
              <td>{{ row.endpoint }}</td>
              <td :class="{ problem: row.is_problem }">{{ row.outcome }}</td>
              <td class="number">{{ row.tokens_in }}</td><td class="number">{{ row.tokens_out }}</td>
              <td class="number">{{ row.first_token }}</td><td class="number">{{ row.total }}</td>
              <td class="where">
                <div v-if="row.time" class="bar" role="img" :aria-label="row.time.summary" :title="row.time.summary">
                  <span v-for="part in row.time.parts" :key="part.kind" :class="part.kind" :style="{ width: part.percent + '%' }"></span>
                </div>
              </td>
            </tr>
            <tr v-if="row.id in opened" class="details">
              <td colspan="8">
                <p v-if="opened[row.id].problem" class="problem" role="alert">{{ opened[row.id].problem }}</p>
                <dl class="figures">
                  <div v-for="one in opened[row.id].figures" :key="one.name"><dt>{{ one.name }}</dt><dd>{{ one.value }}</dd></div>
                </dl>
                <table v-if="opened[row.id].choices">
                  <thead><tr><th v-for="name in opened[row.id].choices.columns" :key="name" scope="col">{{ name }}</th></tr></thead>
                  <tbody>
                    <tr v-for="[name, ...values] in opened[row.id].choices.rows" :key="name">
                      <th scope="row">{{ name }}</th><td v-for="(value, index) in values" :key="index">{{ value }}</td>
                    </tr>
                  </tbody>
                </table>
              </td>
            </tr>
          </template>
        </tbody>
      </table>
    </div>
  </section>`,
  data: () => ({ rows: null, latest: null, opened: {}, phases: ["before", "queue", "prefill", "decode", "after"] }),
  computed: {
    newer() {
      return (this.latest || []).filter(({ id }) => !this.rows.some((row) => row.id === id)).length;
    },
  },
  mounted() {
    this.$emit("ready");
  },
  methods: {
    show(rows) {
      const running = (this.rows || []).filter((row) => row.is_running && row.id in this.opened);
      this.latest = rows;
      this.follow();
      for (const { id } of running) this.$emit("open", id);
    },
    follow() {
      // An open row stays where it is, while somebody reads it.
      const known = new Map((this.latest || []).map((row) => [row.id, row]));
      const reading = this.latest && Object.keys(this.opened).length;
      this.rows = reading ? this.rows.map((row) => known.get(row.id) || row) : this.latest;
    },
    tell(id, details) {
      if (id in this.opened) this.opened[id] = details;
    },
    toggle(id) {
      if (id in this.opened) {
        delete this.opened[id];
        this.follow();
      } else {
        this.opened[id] = {};
        this.$emit("open", id);
      }
    },
    time: (unix) => new Date(1000 * unix).toLocaleTimeString(),
  },
};
