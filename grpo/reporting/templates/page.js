// Shows runs and rollouts from the page's JSON. All text is set as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const experiments = Object.fromEntries(data.experiments.map((e) => [e.name, e]));
const root = document.documentElement;

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
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

const armOf = (experiment, arm) => experiments[experiment].arms.find((each) => each.arm === arm);
const samplesOf = (experiment, arm) =>
  armOf(experiment, arm).runs.flatMap((run) => (data.samples.runs[run] || []).map((row) => sampleOf(row, run)));

function sampleOf(row, run) {
  const sample = Object.fromEntries(data.samples.columns.map((column, i) => [column, row[i]]));
  const [problem, truth] = data.samples.problems[sample.problem];
  return { ...sample, problem, ground_truth: truth, run };
}

function chooseExperiment() {
  const experiment = experiments[choice("experiment").value];
  const arms = experiment.arms.map(({ arm, label }) => [arm, label]);
  fill(choice("arm"), arms, experiment.winner);
  chooseArm();
}

function chooseArm() {
  const samples = samplesOf(choice("experiment").value, choice("arm").value);
  const steps = [...new Set(samples.map((s) => s.step))].sort((a, b) => a - b);
  fill(choice("left"), steps, steps[0]);
  fill(choice("right"), steps, steps.at(-1));
  showOrigin();
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
  const groups = new Map();
  for (const sample of samples) {
    const key = `${sample.run} ${sample.problem}`;
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
  return element("div", { className: "side" }, title, ...(sample.messages ? turns(sample) : [element("pre", {}, ...marked(sample))]));
}

// An episode: what the environment wrote stands apart, under its role.
function turns(sample) {
  return sample.messages.map(([role, text]) => {
    if (role === "assistant") return element("pre", {}, ...marked({ ...sample, response: text }));
    return element("div", { className: "written" }, element("b", { textContent: role }), element("pre", { textContent: text }));
  });
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

// ------------------------------------------------------------------------------------- where numbers come from

function showOrigin() {
  const { runs, by_run } = armOf(choice("experiment").value, choice("arm").value);
  const row = (cells, tag) => element("tr", {}, ...cells.map((cell) => element(tag, {}, cell instanceof Node ? cell : String(cell ?? ""))));
  const names = { mlflow_run_id: "MLflow run", lock: "hash in dvc.lock", total_s: "seconds", same_as: "copied from" };
  const head = ["run", data.metric, ...data.origin.columns.map((name) => names[name] || name)];
  const rows = runs.map((run, i) => {
    const folder = element("a", { href: `../data/runs/${run}/`, textContent: run });
    return row([folder, by_run[i].toFixed(3), ...(data.origin.runs[run] || [])], "td");
  });
  choice("origin").replaceChildren(element("table", {}, element("thead", {}, row(head, "th")), element("tbody", {}, ...rows)));
}

// ------------------------------------------------------------------------------------------------ start

// A link may point into a folded part.
function follow() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let part = target; part; part = part.parentElement) if (part instanceof HTMLDetailsElement) part.open = true;
  if (target) target.scrollIntoView();
}

function start() {
  root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.getElementById("theme").addEventListener("click", () => (root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"));
  const jump = document.getElementById("jump");
  jump.addEventListener("change", () => {
    if (jump.value) location.hash = jump.value;
    jump.value = "";
  });
  fill(choice("experiment"), data.experiments.map((e) => [e.name, e.title]), data.first);
  choice("experiment").addEventListener("change", chooseExperiment);
  choice("arm").addEventListener("change", chooseArm);
  for (const id of ["left", "right", "filter"]) choice(id).addEventListener("change", showRollouts);
  if (data.experiments.length) chooseExperiment();
  addEventListener("hashchange", follow);
  follow();
}

start();
