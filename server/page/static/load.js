// The server's load: figures, the KV cache as a bar, charts of the last minute, and recent requests. Python formats all
// values. A row's contents are requested when it is expanded, and again while its request runs.
const HEIGHT = 100;

export default {
  template: `
  <div class="load-figures">
    <p v-if="seen.problem" class="problem" role="alert">{{ seen.problem }}</p>
    <p v-if="!asked" class="quiet" role="status">Loading …</p>
    <div class="cards">
      <section v-for="(figures, title) in seen.groups" :key="title" class="card">
        <h2>{{ title }}</h2>
        <dl class="figures">
          <div v-for="(value, name) in figures" :key="name"><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
        </dl>
      </section>
      <section v-if="seen.cache" class="card">
        <h2>{{ seen.cache.title }}</h2>
        <div class="bar" role="img" :aria-label="seen.cache.summary">
          <span v-for="part in seen.cache.parts" :key="part.kind" :class="part.kind" :style="{ width: part.percent + '%' }"></span>
        </div>
        <dl class="legend">
          <div v-for="part in seen.cache.parts" :key="part.kind">
            <dt><i :class="part.kind"></i>{{ part.name }}</dt><dd>{{ part.value }}<small>{{ Math.round(part.percent) }}%</small></dd>
          </div>
        </dl>
      </section>
      <section v-if="seen.speculation" class="card">
        <h2>Speculation</h2>
        <table>
          <thead><tr><th v-for="name in seen.speculation.columns" :key="name" scope="col">{{ name }}</th></tr></thead>
          <tbody>
            <tr v-for="[name, ...values] in seen.speculation.rows" :key="name">
              <th scope="row">{{ name }}</th><td v-for="(value, index) in values" :key="index">{{ value }}</td>
            </tr>
          </tbody>
        </table>
      </section>
    </div>
    <div class="charts">
      <section v-for="chart in seen.charts" :key="chart.title" class="card">
        <h2>{{ chart.title }}</h2>
        <div class="chart">
          <span class="top" aria-hidden="true">{{ chart.top.toLocaleString("en") }}</span>
          <svg role="img" :aria-label="chart.summary" :viewBox="'0 0 ' + chart.series[0].values.length + ' ${HEIGHT}'" preserveAspectRatio="none">
            <path v-for="(one, index) in chart.series" :key="one.kind" :class="one.kind" :d="columns(chart, index)"></path>
          </svg>
          <span class="ago" aria-hidden="true">a minute ago</span><span class="now" aria-hidden="true">now</span>
        </div>
        <dl class="legend">
          <div v-for="one in [...chart.series].reverse()" :key="one.kind">
            <dt><i :class="one.kind"></i>{{ one.name }}</dt><dd>{{ one.now }}</dd>
          </div>
        </dl>
      </section>
    </div>
    <p class="quiet">Rates and latencies cover the last {{ seconds }} seconds.</p>
    <section v-if="rows" class="card requests">
      <h2>Your recent requests</h2>
      <ul class="legend" aria-hidden="true">
        <li v-for="name in phases" :key="name"><i :class="name"></i>{{ name }}</li>
      </ul>
      <p v-if="!rows.length" class="quiet">No requests with this key yet.</p>
      <div v-else class="scroll" role="region" tabindex="0" aria-label="Your recent requests">
        <p v-if="newer" class="quiet">{{ newer }} newer; close all rows to show them.</p>
        <table>
          <thead>
            <tr>
              <th scope="col">Time</th><th scope="col">Endpoint</th><th scope="col">Outcome</th>
              <th scope="col" class="number">Tokens in</th><th scope="col" class="number">Out</th>
              <th scope="col" class="number">First token</th><th scope="col" class="number">Total</th>
              <th scope="col" class="where">Time by phase</th>
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
                    <div v-for="(value, name) in opened[row.id].figures" :key="name"><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
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
    </section>
  </div>`,
  props: { seconds: Number },
  data: () => ({
    asked: false,
    seen: { problem: "", groups: {}, charts: [] },
    rows: null,
    latest: null,
    opened: {},
    phases: ["before", "queue", "prefill", "decode", "after"],
  }),
  computed: {
    newer() {
      return (this.latest || []).filter(({ id }) => !this.rows.some((row) => row.id === id)).length;
    },
  },
  mounted() {
    this.$emit("ready");
  },
  methods: {
    show(seen) {
      this.seen = seen;
      this.asked = true;
    },
    showRequests(rows) {
      const running = (this.rows || []).filter((row) => row.is_running && row.id in this.opened);
      this.latest = rows;
      this.follow();
      for (const { id } of running) this.$emit("open", id);
    },
    follow() {
      // While a row is expanded, rows keep their places.
      const known = new Map((this.latest || []).map((row) => [row.id, row]));
      const reading = this.latest && Object.keys(this.opened).length;
      this.rows = reading ? this.rows.map((row) => known.get(row.id) || row) : this.latest;
    },
    showDetails(id, details) {
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
    columns(chart, index) {
      // The SVG path of one series, stacked on the earlier series.
      const scale = HEIGHT / chart.top;
      return chart.series[index].values
        .map((value, second) => {
          if (!value) return "";
          const below = chart.series.slice(0, index).reduce((sum, one) => sum + one.values[second], 0);
          return `M${second + 0.1} ${HEIGHT - scale * below}h.8v${-scale * value}h-.8z`;
        })
        .join("");
    },
  },
};
