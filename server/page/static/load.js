// What the server does: figures, the KV cache as a bar, and charts of the last minute. All words come from Python.
const HEIGHT = 100;

export default {
  template: `
  <div class="load-figures">
    <p v-if="seen.problem" class="problem" role="alert">{{ seen.problem }}</p>
    <p v-if="!asked" class="quiet" role="status">Asking the server …</p>
    <div class="cards">
      <section v-for="group in seen.groups" :key="group.title" class="card">
        <h2>{{ group.title }}</h2>
        <dl class="figures">
          <div v-for="one in group.figures" :key="one.name"><dt>{{ one.name }}</dt><dd>{{ one.value }}</dd></div>
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
  </div>`,
  data: () => ({ asked: false, seen: { problem: "", groups: [], charts: [] } }),
  methods: {
    show(seen) {
      this.seen = seen;
      this.asked = true;
    },
    columns(chart, index) {
      // One series, each column upon those of the series before it.
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
