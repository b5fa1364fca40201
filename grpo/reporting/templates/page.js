// Shows rollouts and runs from the page's JSON. All text is set as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
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
  const arms = experiment.arms.filter(({ arm }) => samplesOf(experiment.name, arm).length).map(({ arm, title }) => [arm, title]);
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

// Marks tags as the form, and the text in answer tags or a box as the answer.
function marked(sample) {
  const kind = isRight(sample) ? "right" : "wrong";
  const parts = sample.response.split(/(<\/?think>|<\/?answer>|\\boxed\{(?:[^{}]|\{[^{}]*\})*\})/);
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
    element("h3", { textContent: "Configuration, with the source of each value" }),
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

// A link may point into a folded section, or name a run: #run=EXPERIMENT/ARM/SEED.
function follow() {
  const name = decodeURIComponent(location.hash.slice(1));
  if (name.startsWith("run=")) return openRun(name.slice(4));
  const target = document.getElementById(name);
  if (target instanceof HTMLDetailsElement) target.open = true;
}

function start() {
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.getElementById("theme").addEventListener("click", () => (root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"));
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
  fill(choice("experiment"), withSamples.map((e) => [e.name, e.title]), data.best);
  choice("experiment").addEventListener("change", chooseExperiment);
  choice("arm").addEventListener("change", chooseArm);
  for (const id of ["problem", "left", "right", "filter"]) choice(id).addEventListener("change", showRollouts);
  if (withSamples.length) chooseExperiment();
  addEventListener("hashchange", follow);
  follow();
}

start();
