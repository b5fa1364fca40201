// Draws what the page's JSON holds: curves, heat maps, rollouts, a run's page. All text is set as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const alike = (place) => data.alike[place]; // what many runs have alike is held once
for (const run of Object.values(data.runs)) Object.assign(run, { config: run.config.map(alike), software: alike(run.software), hardware: alike(run.hardware) });
const experiments = Object.fromEntries(data.experiments.map((e) => [e.name, e]));
const root = document.documentElement;
const $ = (selector, within = document) => within.querySelector(selector);

function element(tag, properties = {}, ...children) {
  const { dataset, ...others } = properties;
  const made = Object.assign(document.createElement(tag), others);
  Object.assign(made.dataset, dataset);
  made.append(...children);
  return made;
}

// ------------------------------------------------------------------------------------------------ theme

const dark = () => root.dataset.theme === "dark";

function setTheme(theme) {
  root.dataset.theme = theme;
  for (const draw of drawn.values()) draw();
}

// ----------------------------------------------------------------------------------------------- curves

const drawn = new Map(); // what is drawn already, and is drawn again when the theme or the width changes

const colourOf = (arm) => (dark() ? data.palette.dark[data.palette.colours[arm.place]] : data.palette.colours[arm.place]);

// A run that equals an earlier one has that one's curves.
const tablesOf = (run) => data.runs[run].tables || data.runs[data.runs[run].same_as].tables;

function pointsOf(experiment, metric, axis, seeds, hidden) {
  const points = [];
  for (const arm of experiment.arms) {
    if (hidden.has(arm.arm)) continue;
    const runs = arm.runs.map((name) => ({ name, run: data.runs[name], rows: tablesOf(name)[metric.table] }));
    if (runs.some(({ rows }) => !rows[axis])) continue;
    const ended = (run, step) => run.metrics.diverged_step === step;
    if (seeds) {
      for (const { run, rows } of runs)
        rows.step.forEach((step, i) => {
          const y = rows[metric.column][i];
          points.push({ arm: arm.arm, series: `${arm.arm}, seed ${run.seed}`, x: rows[axis][i], y, low: y, high: y, ended: ended(run, step) });
        });
      continue;
    }
    const at = new Map(); // step -> values of the seeds that got so far
    for (const { run, rows } of runs)
      rows.step.forEach((step, i) => {
        if (!at.has(step)) at.set(step, { x: [], y: [], ended: false });
        const here = at.get(step);
        here.x.push(rows[axis][i]);
        if (rows[metric.column][i] !== null) here.y.push(rows[metric.column][i]);
        here.ended ||= ended(run, step);
      });
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    for (const { x, y, ended: end } of at.values())
      if (y.length) points.push({ arm: arm.arm, series: arm.arm, x: mean(x), y: mean(y), low: Math.min(...y), high: Math.max(...y), ended: end });
  }
  return points;
}

function endLabels(points, domain) {
  const last = new Map(points.filter((p) => p.y !== null).map((p) => [p.arm, p]));
  const gap = 0.055 * (domain[1] - domain[0]);
  const right = Math.max(...points.map((p) => p.x));
  const placed = [];
  for (const { arm, y } of [...last.values()].sort((a, b) => a.y - b.y))
    placed.push({ arm, x: right, y: placed.length ? Math.max(y, placed.at(-1).y + gap) : y });
  let limit = domain[1];
  for (const label of placed.toReversed()) {
    label.y = Math.min(label.y, limit);
    limit = label.y - gap;
  }
  return placed;
}

function drawCurve(section, experiment, hidden) {
  const metric = experiment.metrics[$(".metric", section).value];
  const axisSelect = $(".axis", section);
  for (const option of axisSelect.options)
    option.disabled = !experiment.arms.some((arm) => arm.runs.every((run) => tablesOf(run)[metric.table][option.value]));
  if (axisSelect.selectedOptions[0].disabled) axisSelect.value = "step";
  const axis = axisSelect.value;
  const points = pointsOf(experiment, metric, axis, $(".seeds", section).checked, hidden);
  const heights = points.flatMap((p) => [p.low, p.high]).filter((y) => y !== null);
  const domain = metric.share || !heights.length ? [0, 1] : [Math.min(...heights), Math.max(...heights)];
  const chart = $(".chart", section);
  const narrow = chart.clientWidth < 600;
  const arms = experiment.arms.map((arm) => arm.arm);
  const longest = Math.max(...arms.map((arm) => arm.length));
  const spec = structuredClone(data.curve);
  spec.description = `${experiment.title}: ${metric.title} over ${axisSelect.selectedOptions[0].text}`;
  spec.width = Math.max(180, chart.clientWidth - 70 - (narrow ? 10 : 7 * longest + 16));
  spec.height = narrow ? 260 : 300;
  spec.datasets = { points, labels: narrow || !points.length ? [] : endLabels(points, domain) };
  spec.encoding.x.title = axisSelect.selectedOptions[0].text;
  spec.encoding.color.scale = { domain: arms, range: experiment.arms.map(colourOf) };
  spec.layer[1].encoding.strokeDash.scale = { domain: arms, range: experiment.arms.map((arm) => data.palette.dashes[arm.place]) };
  for (const layer of spec.layer)
    Object.assign(layer.encoding.y, { title: metric.title, scale: metric.share ? { domain: [0, 1] } : { zero: false } });
  // A layer without data would make Vega complain of its extent.
  spec.layer = spec.layer.filter((layer, i) => (i === 3 ? points.some((p) => p.ended) : i === 4 ? spec.datasets.labels.length : true));
  if (points.length) embed(chart, spec, "svg");
  else chart.replaceChildren();
  const missing = arms.filter((arm) => !hidden.has(arm) && !points.some((p) => p.arm === arm));
  const seeds = $(".seeds", section).checked ? "One line a seed." : "Mean over seeds, with their range.";
  $(".chart-note", section).textContent =
    `${seeds} A cross: diverged and stopped.` + (missing.length ? ` Not measured on this axis: ${missing.join(", ")}.` : "");
}

function embed(place, spec, renderer) {
  const ink = getComputedStyle(root).getPropertyValue("--ink").trim();
  const line = getComputedStyle(root).getPropertyValue("--line").trim();
  const config = { background: null, axis: { labelColor: ink, titleColor: ink, gridColor: line, tickColor: line }, legend: { labelColor: ink, titleColor: ink }, title: { color: ink, subtitleColor: ink } };
  const theme = dark() ? "dark" : "light";
  return vegaEmbed(place, spec, { actions: false, renderer, config, tooltip: { theme } }).catch((error) => {
    place.textContent = String(error);
    console.error(error);
  });
}

// A figure as it is on paper, in the width of its column; on dark ground with the colours for it.
function drawFigure(place) {
  let text = JSON.stringify(data.figures[place.dataset.figure]);
  if (dark()) for (const [light, lighter] of Object.entries(data.palette.dark)) text = text.replaceAll(`"${light}"`, `"${lighter}"`);
  const spec = JSON.parse(text);
  for (const part of spec.vconcat || [spec]) {
    part.width = Math.max(200, place.clientWidth - spec.usermeta.room);
    // Names above points that are close together.
    for (const { mark } of part.layer) if (place.clientWidth < 600 && mark.baseline === "bottom") Object.assign(mark, { angle: -40, align: "left" });
  }
  delete spec.background;
  embed(place, spec, "svg");
}

function setUpFigures(details) {
  const draw = () => details.open && details.querySelectorAll("[data-figure]").forEach(drawFigure);
  details.addEventListener("toggle", draw);
  drawn.set(details, draw);
}

function swatch(arm) {
  const dashes = data.palette.dashes[arm.place].join(" ");
  const colour = colourOf(arm);
  const picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [key, value] of Object.entries({ x1: 0, x2: 26, y1: 4, y2: 4, stroke: colour, "stroke-width": 3, "stroke-dasharray": dashes }))
    stroke.setAttribute(key, value);
  picture.append(stroke);
  picture.setAttribute("aria-hidden", "true");
  return picture;
}

function setUpExperiment(section) {
  const experiment = experiments[section.dataset.experiment];
  const hidden = new Set();
  const draw = () => {
    const legend = $(".legend", section);
    legend.replaceChildren(
      ...experiment.arms.map((arm) => {
        const button = element("button", { type: "button" }, swatch(arm), arm.arm);
        button.setAttribute("aria-pressed", String(!hidden.has(arm.arm)));
        button.addEventListener("click", () => {
          hidden.has(arm.arm) ? hidden.delete(arm.arm) : hidden.add(arm.arm);
          draw();
          legend.children[arm.place].focus();
        });
        return button;
      }),
    );
    drawCurve(section, experiment, hidden);
  };
  for (const control of section.querySelectorAll(".metric, .axis, .seeds")) control.addEventListener("change", draw);
  new IntersectionObserver((entries, observer) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    drawn.set(`${experiment.name} curve`, draw);
    draw();
  }, { rootMargin: "500px" }).observe(section);
  const heat = $(".heat", section);
  const drawMap = () => heat.open && drawHeat(heat, experiment.outcomes[$(".heat-arm", heat).value]);
  heat.addEventListener("toggle", drawMap);
  $(".heat-arm", heat).addEventListener("change", drawMap);
  drawn.set(`${experiment.name} heat`, drawMap);
}

// --------------------------------------------------------------------------------------------- heat map

function drawHeat(heat, outcomes) {
  const reward = outcomes.rows.map((row) => [...row].map((character) => outcomes.levels[parseInt(character, 36)]));
  const problems = reward[0].map((_, problem) => problem);
  const sum = problems.map((problem) => reward.reduce((total, row) => total + row[problem], 0));
  const first = problems.map((problem) => reward.findIndex((row) => row[problem] === 1));
  const soon = (problem) => (first[problem] < 0 ? reward.length : first[problem]);
  const order = problems.toSorted((a, b) => soon(a) - soon(b) || sum[b] - sum[a] || a - b);
  const cells = outcomes.steps.flatMap((step, i) => order.map((problem, place) => ({ step, place, problem, reward: reward[i][problem] })));
  const spec = structuredClone(data.heat);
  const room = Math.max(200, heat.clientWidth - 70);
  spec.width = room - (room >= problems.length ? room % problems.length : 0); // whole pixels for each, without seams
  spec.datasets = { cells };
  const last = reward.at(-1);
  const count = (test) => problems.filter(test).length;
  $(".heat-note", heat).textContent =
    `Of ${problems.length} problems ${count((p) => reward[0][p] === 1)} are right in all seeds before training and ${count((p) => last[p] === 1)} at the end; ` +
    `${count((p) => last[p] > reward[0][p])} gained, ${count((p) => last[p] < reward[0][p])} lost.`;
  embed($(".heat-chart", heat), spec, "canvas");
}

// --------------------------------------------------------------------------------------------- rollouts

const choice = (id) => document.getElementById(`r-${id}`);

function fill(select, values, chosen) {
  const options = values.map((value) => (Array.isArray(value) ? value : [value, value]));
  select.replaceChildren(...options.map(([value, text]) => element("option", { value, textContent: text })));
  if (options.some(([value]) => String(value) === String(chosen))) select.value = chosen;
}

const samplesOf = (experiment, arm) =>
  experiments[experiment].arms.find((each) => each.arm === arm).runs.flatMap((run) => (data.samples.runs[run] || []).map((row) => sampleOf(row, run)));

function sampleOf(row, run) {
  const sample = Object.fromEntries(data.samples.columns.map((column, i) => [column, row[i]]));
  const [problem, truth] = data.samples.problems[sample.problem];
  return { ...sample, problem, ground_truth: truth, run };
}

function chooseExperiment() {
  const experiment = experiments[choice("experiment").value];
  const arms = experiment.arms.map((arm) => arm.arm).filter((arm) => samplesOf(experiment.name, arm).length);
  fill(choice("arm"), arms, experiment.winner);
  chooseArm();
}

function chooseArm() {
  const samples = samplesOf(choice("experiment").value, choice("arm").value);
  const steps = [...new Set(samples.map((s) => s.step))].sort((a, b) => a - b);
  fill(choice("left"), steps, steps[0]);
  fill(choice("right"), steps, steps.at(-1));
  fill(choice("problem"), [["", "all"], ...new Set(samples.map((s) => s.problem))], "");
  showRollouts();
}

const isRight = (sample) => sample && sample.answer_reward === 1;
const hasForm = (sample) => sample && sample.format_reward === 1;
const FILTERS = {
  all: () => true,
  form: (left, right) => [left, right].some((s) => s && hasForm(s) && !isRight(s)),
  right: (left, right) => isRight(left) || isRight(right),
  noform: (left, right) => [left, right].some((s) => s && !hasForm(s)),
  learned: (left, right) => !isRight(left) && isRight(right),
};

function showRollouts() {
  const samples = samplesOf(choice("experiment").value, choice("arm").value);
  const [left, right] = [Number(choice("left").value), Number(choice("right").value)];
  const only = choice("problem").value;
  const groups = new Map();
  for (const sample of samples) {
    const key = `${sample.run} ${sample.problem}`;
    if (only && sample.problem !== only) continue;
    if (!groups.has(key)) groups.set(key, {});
    groups.get(key)[sample.step] = sample;
  }
  const shown = [...groups.values()].filter((at) => FILTERS[choice("filter").value](at[left], at[right]));
  choice("count").textContent = `${shown.length} of ${groups.size} stored samples.`;
  choice("list").replaceChildren(...shown.map((at) => card(at[left], at[right])));
}

function card(left, right) {
  const any = left || right;
  const prompt = element("details", {}, element("summary", { textContent: "prompt" }), element("pre", { textContent: data.samples.prompts[any.prompt] }));
  const head = element("p", {}, element("b", { textContent: any.problem }), ` truth `, element("code", { textContent: any.ground_truth }), ` ${any.run}`);
  return element("article", { className: "card" }, head, prompt, element("div", { className: "sides" }, side(left), side(right)));
}

function side(sample) {
  if (!sample) return element("div", { className: "side", textContent: "no sample at this step" });
  const outcome = isRight(sample) ? "answer right" : hasForm(sample) ? "form right, answer wrong" : "form wrong";
  const title = element("h4", { textContent: `Step ${sample.step}: ${outcome}, entropy ${sample.token_entropy ?? "not known"}` });
  return element("div", { className: "side" }, title, element("pre", {}, ...marked(sample)));
}

// Tags are marked as the form; what stands in the last answer or box, as the answer.
function marked(sample) {
  const kind = isRight(sample) ? "right" : "wrong";
  const parts = sample.response.split(/(<\/?think>|<\/?answer>|\\boxed\{[^}]*\})/);
  return parts.map((text, i) => {
    if (/^<\/?(think|answer)>$/.test(text)) return element("mark", { className: "form", textContent: text });
    if (text.startsWith("\\boxed{") || (text && parts[i - 1] === "<answer>")) return element("mark", { className: kind, textContent: text });
    return text;
  });
}

// -------------------------------------------------------------------------------------------- run's page

const show = (value) => (value !== null && typeof value === "object" ? JSON.stringify(value) : String(value ?? "none"));

function table(head, rows) {
  const row = (cells, tag) => element("tr", {}, ...cells.map((cell) => element(tag, {}, cell instanceof Node ? cell : show(cell))));
  return element("div", { className: "wide" }, element("table", {}, element("thead", {}, row(head, "th")), element("tbody", {}, ...rows.map((cells) => row(cells, "td")))));
}

function openRun(name) {
  const run = data.runs[name];
  if (!run) return;
  const facts = [["MLflow run", run.mlflow_run_id], ["commit", run.commit], ["hash in dvc.lock", run.lock], ["seconds", run.seconds]];
  if (run.same_as) facts.unshift(["the same as", run.same_as]);
  for (const [phase, seconds] of Object.entries(run.phases)) facts.push([phase, seconds]);
  const files = data.files.map((path) => path.replace("RUN", name)).map((path) => element("li", {}, element("a", { href: `../${path}`, textContent: path })));
  $("#run-body").replaceChildren(
    element("h2", { id: "run-title", textContent: name }),
    table(["", ""], facts),
    element("h3", { textContent: "Configuration, and where each value comes from" }),
    table(["key", "value", "from"], run.config),
    element("h3", { textContent: "Final numbers" }),
    table(["", ""], Object.entries(run.metrics)),
    element("h3", { textContent: "Software and hardware" }),
    table(["", ""], [...Object.entries(run.software), ...Object.entries(run.hardware)]),
    element("h3", { textContent: "Files (data/ is kept by DVC)" }),
    element("ul", {}, ...files),
  );
  const dialog = $("#run");
  if (!dialog.open) dialog.showModal();
}

// ------------------------------------------------------------------------------------------------ start

// A link may lead into something that is folded, or name a run: #run=EXPERIMENT/ARM/SEED.
function follow() {
  const name = decodeURIComponent(location.hash.slice(1));
  if (name.startsWith("run=")) return openRun(name.slice(4));
  const target = document.getElementById(name);
  if (target instanceof HTMLDetailsElement) target.open = true;
}

function start() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.getElementById("theme").addEventListener("click", () => setTheme(dark() ? "light" : "dark"));
  document.querySelectorAll(".experiment").forEach(setUpExperiment);
  document.querySelectorAll("details:has(> .figure)").forEach(setUpFigures);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.run");
    if (button) openRun(button.dataset.run);
    if (event.target === $("#run")) $("#run").close();
  });
  $("#jump").addEventListener("change", (event) => {
    if (event.target.value) location.hash = event.target.value;
    event.target.value = "";
  });
  const withSamples = data.experiments.filter((e) => e.arms.some((arm) => samplesOf(e.name, arm.arm).length));
  fill(choice("experiment"), withSamples.map((e) => [e.name, e.title]), data.best.experiment);
  choice("experiment").addEventListener("change", chooseExperiment);
  choice("arm").addEventListener("change", chooseArm);
  for (const id of ["problem", "left", "right", "filter"]) choice(id).addEventListener("change", showRollouts);
  if (withSamples.length) chooseExperiment();
  let resized;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(resized);
    resized = setTimeout(() => drawn.forEach((draw) => draw()), 150);
  });
  addEventListener("hashchange", follow);
  follow();
}

start();
