"use strict";
// The closed form as Python recorded it (harness/report/traced.py), executed on the reader's plan.
const each = (f) => (...of) => of.some(Array.isArray)
  ? [0, 1, 2].map((k) => f(...of.map((one) => (Array.isArray(one) ? one[k] : one)))) : f(...of);
const OPERATIONS = {
  add: each((a, b) => a + b), subtract: each((a, b) => a - b), multiply: each((a, b) => a * b), divide: each((a, b) => a / b),
  floor_divide: each((a, b) => Math.floor(a / b)), power: each((a, b) => a ** b), invert: each((a) => !a),
  maximum: each(Math.max), minimum: each(Math.min), where: each((is, a, b) => (is ? a : b)),
  equal: each((a, b) => a == b), greater: each((a, b) => a > b), greater_equal: each((a, b) => a >= b),
  less: each((a, b) => a < b), less_equal: each((a, b) => a <= b), bitwise_or: each((a, b) => a | b),
  max: (of) => Math.max(...of), stack: (...of) => of, item: (of, place) => of[place],
};
let DATA;

function lookedUp(table, knobs) {
  table.places ??= new Map(table.knobs[0].map((_, row) => [table.knobs.map((column) => column[row]).join(), row]));
  const row = table.places.get(knobs.join());
  return row === undefined ? undefined : table.columns.map(([values, at]) => values[at[row]]);
}

function executed(program, laws, inputs) {
  const found = [];
  for (const [name, ...parts] of program.lines) {
    const of = parts.map((part) => (typeof part === "number" ? found[part] : Array.isArray(part) ? part[0] : part));
    found.push(name === "input" ? inputs[of[0]] : name === "row" ? lookedUp(laws[of[0]], of.slice(1)) : OPERATIONS[name](...of));
  }
  const named = (of) => (typeof of === "number" ? found[of] : Array.isArray(of) ? of.map(named)
    : Object.fromEntries(Object.entries(of).map(([name, one]) => [name, named(one)])));
  return named(program.results);
}

// A knob without effect in a plan keeps its default, as where plans are searched.
function settled(asked, model) {
  const c = {...asked, dp: asked.gpus / (asked.tp * asked.cp * asked.pp)};
  if (c.pp === 1) c.schedule = "one_f_one_b";
  if (c.schedule !== "interleaved") c.chunks = 1;
  if (c.tp === 1) c.sequence_parallel = false;
  if (c.dp * c.cp === 1) c.zero_stage = 0;
  if (!model.experts) c.ep = 1;
  return {...c, sequence_parallel: Boolean(c.sequence_parallel), microbatches: c.batch / (c.dp * c.microbatch)};
}

const divisors = (n) => Array.from({length: n}, (_, i) => i + 1).filter((d) => n % d === 0);

// Why a plan is impossible, in Python's words and order; empty: it is not.
function problem(c, plan) {
  const {batch, microbatch: b, dp, pp: p, microbatches: m} = c, of = c.tp * c.cp * c.pp;
  if (c.gpus % of) return `${c.gpus} GPUs are no multiple of tp × cp × pp, ${of}`;
  if (batch % (b * dp)) {
    const valid = batch % dp ? `plan.dp must divide ${batch}` : `valid microbatches: ${divisors(batch / dp).join(", ")}`;
    return `train.global_batch ${batch} is not divisible by train.microbatch ${b} x plan.dp ${dp}; ${valid}`;
  }
  const text = plan.reasons[`${c.tp} ${c.cp} ${Number(c.sequence_parallel)}`] ?? "";
  if (text.startsWith("plan.tp")) return text;
  if (plan.stages[p * c.chunks]) return plan.stages[p * c.chunks];
  if (c.schedule === "interleaved" && m % p) {
    const near = m > p ? `${Math.floor(m / p) * p} or ${(Math.floor(m / p) + 1) * p}` : p;
    return `plan.schedule interleaved takes multiples of plan.pp ${p} microbatches, not ${m}; valid: ${near}`;
  }
  const valid = divisors(plan.model.experts || 1).filter((ep) => (dp * c.cp) % ep === 0);
  if (!text && !valid.includes(c.ep))
    return `plan.ep ${c.ep} does not divide model.experts ${plan.model.experts} and the ${dp * c.cp} ranks of plan.dp and plan.cp; valid: ${valid.join(", ")}`;
  return text || (dp > DATA.most_dp ? `plan.dp ${dp} is not in the planner; valid: up to ${DATA.most_dp}` : "");
}

// What makes a prediction doubtful, how far off steps of its kind were, and between which seconds nine of ten are.
function doubts(c, plan, system, seconds) {
  const {octave, nine_tenths: wide, names} = DATA.features, {model} = plan;
  const sizes = {gpus: c.gpus, hidden_size: model.hidden_size, layers: model.layers,
    tokens: Math.floor(c.microbatch * model.seq_len / c.cp), seq_len: model.seq_len, tp: c.tp, pp: c.pp, dp: c.dp};
  const of = {...plan.features[c.tp], recompute: c.recompute, sequence_parallel: c.sequence_parallel, zero_stage: c.zero_stage,
    schedule: c.schedule, tp_over_nodes: c.tp > system.node, cp_attention: "ring"};
  const axes = {sequence_parallel: c.tp, tp_over_nodes: c.tp, partition_activations: c.tp, zero_stage: c.dp * c.cp,
    schedule: c.pp, cp_attention: c.cp};
  const features = Object.fromEntries(names.filter((name) => name in of && axes[name] !== 1).map((name) => [name, String(of[name])]));
  const warnings = [], unseen = [], kinds = [], beyond = [];
  for (const [name, [least, most]] of Object.entries(system.ranges)) {
    const by = Math.max(Math.log2(least / sizes[name]), Math.log2(sizes[name] / most));
    if (by > 0) beyond.push(octave * by);
    if (by >= 1) warnings.push(`extrapolates: ${name} ${sizes[name]}, calibrated on ${least} to ${most}`);
  }
  for (const [name, value] of Object.entries(features)) {
    const [warning, doubt] = plan.kinds[`${name} ${value}`] ?? ["", ""];
    if (warning) unseen.push(warning);
    if (doubt) kinds.push(doubt);
  }
  const stages = c.pp * c.chunks, unequal = plan.are_equal && model.layers % stages
    ? [`extrapolates: stages ${model.layers} layers on ${stages}, calibrated on equal ones`] : [];
  const ways = plan.differences[`${Math.min(c.tp, 2)} ${Math.min(c.dp * c.cp, 2)}`];
  const more = wide * Math.hypot(...beyond), [low, high] = plan.bounds[`${c.tp} ${c.microbatch}`].map((side) => Math.hypot(side, more));
  const shift = unseen.length ? "a kind of plan or block that was not fitted" : beyond.length ? "beyond the fitted sizes" : "within the fitted sizes";
  const off = (one) => Object.entries(sizes).reduce((sum, [name, size]) => sum + Math.log2(size / one.sizes[name]) ** 2, 0)
    + names.filter((name) => name in features && features[name] !== one.features[name]).length;
  const nearest = system.published.reduce((best, one) => (best && off(best) <= off(one) ? best : one), null);
  return {warnings: [...warnings, ...unseen, ...unequal, ...ways], kinds, shift, low: seconds * Math.exp(-low), high: seconds * Math.exp(high), nearest, sizes};
}

function judged(asked) {
  const plan = DATA.plans[`${asked.system} ${asked.model}`], system = DATA.systems[asked.system], {model} = plan, c = settled(asked, model);
  const reason = problem(c, plan);
  if (reason) return {choice: c, reason};
  const number = (name, value) => (DATA.names[name] ? DATA.names[name].indexOf(value) : Number(value));
  const own = Object.fromEntries(Object.keys(DATA.defaults).filter((name) => name in c).map((name) => [name, number(name, c[name])]));
  const inputs = {...DATA.defaults, ...own, microbatch: c.microbatch, global_batch: c.batch};
  const found = executed(DATA.programs[plan.program], plan.laws, inputs);
  const total = (parts) => Object.values(parts).reduce((sum, one) => sum + one, 0);
  const memory = found.memory.reduce((most, one) => (total(one) > total(most) ? one : most));
  const mfu = model.flops * c.batch / found.seconds / c.gpus / model.peak;
  const left = system.memory - total(memory), [least, most] = system.taken;
  const fit = left < least ? "does not fit" : left >= most ? "fits" : "may fit";
  return {choice: c, ...found, memory, total: total(memory), fit, mfu,
    ...doubts(c, plan, system, found.seconds)};
}

// A rank's actions in order, as impl/pipeline/schedules.py has them: [operation, stage, microbatch].
function rowOf(rank, {schedule, pp: p, microbatches: m, chunks: v}) {
  const warmup = schedule === "gpipe" ? m : v > 1 ? 2 * (p - rank - 1) + (v - 1) * p : p - rank - 1;
  const turns = [], isSplit = schedule === "zb_h1";
  for (let first = 0; first < m; first += p)
    for (let chunk = 0; chunk < v; chunk++)
      for (let i = first; i < Math.min(first + p, m); i++) turns.push([chunk, i]);
  const forwards = turns.map(([chunk, i]) => ["F", chunk * p + rank, i]);
  const back = (op) => turns.map(([chunk, i]) => [op, (v - 1 - chunk) * p + rank, i]);
  const columns = isSplit ? [back("I"), [...Array(rank).fill(null), ...back("W")]] : [back("B")];
  const row = forwards.slice(0, warmup), rest = [forwards.slice(warmup), ...columns];
  for (let turn = 0; turn < Math.max(...rest.map((of) => of.length)); turn++) row.push(...rest.map((of) => of[turn]).filter(Boolean));
  return row;
}

// Start and end of every action, each as early as its rank and what it awaits allow: [rank, operation, stage, i, start, end].
function timeline(c, passes, hops) {
  const {pp: p, chunks: v} = c, last = p * v - 1, rows = Array.from({length: p}, (_, rank) => rowOf(rank, c));
  const of = {F: passes.forward, B: passes.backward, I: passes.input_gradient, W: passes.weight_gradient};
  const delay = (a, b) => (p === 2 || Math.abs(a - b) === 1 ? hops.one_way / (p - 1) : hops.back);
  const arrived = new Map(), links = new Map(), clock = Array(p).fill(0), next = Array(p).fill(0), spans = [];
  for (let isMoving = true; isMoving;) {
    isMoving = false;
    for (let rank = 0; rank < p; rank++)
      for (; next[rank] < rows[rank].length; next[rank]++) {
        const [op, stage, i] = rows[rank][next[rank]], way = op === "F" ? 1 : -1, from = stage - way;
        const awaited = op !== "W" && from >= 0 && from <= last ? arrived.get(`${op} ${from} ${i}`) : 0;
        if (awaited === undefined) break;
        const start = Math.max(clock[rank], awaited), end = (clock[rank] = start + of[op][stage === 0 ? 0 : stage === last ? 2 : 1]);
        const to = (stage + way + p) % p, link = `${rank} ${to}`, isSent = op !== "W" && to !== rank && stage + way >= 0 && stage + way <= last;
        if (isSent) links.set(link, Math.max(end, links.get(link) ?? 0) + delay(rank, to));
        arrived.set(`${op} ${stage} ${i}`, isSent ? links.get(link) : end);
        spans.push([rank, op, stage, i, start, end]);
        isMoving = true;
      }
  }
  return spans;
}

// The page ------------------------------------------------------------------------------------------------------------

const GIB = 2 ** 30, MOST_PASSES = 6000;
const seconds = (of) => (of >= 0.1 ? `${Number(of.toPrecision(4))} s` : `${Number((1e3 * of).toPrecision(4))} ms`);
const gib = (of) => (of / GIB).toFixed(2);
const percent = (of) => `${(100 * of).toFixed(1)}%`;
const CONTROLS = {system: "System", model: "Model", gpus: "GPUs", batch: "Global batch (sequences)", tp: "Tensor parallel (tp)",
  cp: "Context parallel (cp)", ep: "Expert parallel (ep)", pp: "Pipeline (pp)", microbatch: "Microbatch (sequences)", zero_stage: "ZeRO stage",
  recompute: "Recomputation", schedule: "Schedule", chunks: "Placement: chunks a rank", sequence_parallel: "Sequence parallel"};
const START = {gpus: 64, batch: 64, tp: 8, pp: 8, schedule: "interleaved", recompute: "full", chunks: 2};
const OPERATION = {F: "forward", B: "backward", I: "input gradient", W: "weight gradient"};
const element = (name, about = {}, ...inside) => {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(about)) made.setAttribute(key, value);
  made.append(...inside);
  return made;
};

function controls(place, changed) {
  const chosen = {};
  for (const [knob, label] of Object.entries(CONTROLS)) {
    const values = DATA.grid[knob], at = Math.max(0, values.indexOf(START[knob])), isList = knob === "system" || knob === "model";
    const shown = element("output", {for: knob});
    const input = isList ? element("select", {id: knob}, ...values.map((value) => element("option", {}, value)))
      : element("input", {id: knob, type: "range", min: 0, max: values.length - 1, value: at});
    const read = () => {
      chosen[knob] = values[isList ? input.selectedIndex : Number(input.value)];
      shown.textContent = isList ? "" : String(chosen[knob]);
      if (input.type === "range") input.setAttribute("aria-valuetext", String(chosen[knob]));
    };
    input.addEventListener("input", () => (read(), changed(chosen)));
    read();
    place.append(element("div", {class: "knob"}, element("label", {for: knob}, label), shown, input));
  }
  changed(chosen);
}

function drawn(found) {
  const {pp: p, chunks: v, microbatches: m} = found.choice, count = 2 * p * v * m;
  if (count > MOST_PASSES) return `${count.toLocaleString("en")} passes are too many to draw; up to ${MOST_PASSES.toLocaleString("en")} are drawn.`;
  const spans = timeline(found.choice, found.passes, found.hops), end = Math.max(...spans.map((span) => span[5]));
  const x = (time) => (1000 * time / Math.max(end, found.seconds)).toFixed(2), height = Math.max(6, Math.min(24, 320 / p));
  const box = (rank, start, stop) => `M${x(start)} ${rank * height}H${x(stop)}V${((rank + 0.88) * height).toFixed(1)}H${x(start)}Z`;
  const paths = Object.entries(OPERATION).map(([op]) => [op, spans.filter((span) => span[1] === op).map(([rank, , , , ...when]) => box(rank, ...when)).join("")]);
  const text = `Pipeline ranks from top to bottom, ${m} microbatches: ${seconds(end)} of passes in a step of ${seconds(found.seconds)}`;
  const keys = paths.filter(([, path]) => path).map(([op]) => `<span class="op ${op}">${OPERATION[op]}</span>`).join(" ");
  return `<div class="scroll" tabindex="0"><svg viewBox="0 0 1000 ${p * height}" preserveAspectRatio="none" role="img" aria-label="${text}">`
    + `<rect width="1000" height="${p * height}"/>${paths.map(([op, path]) => `<path class="${op}" d="${path}"/>`).join("")}</svg></div>`
    + `<p class="legend">${keys} ${text}; the rest of it sums gradients and updates.</p>`;
}

function show(verdict, place, asked) {
  const found = judged(asked), {choice: c} = found, list = (of) => of.map((text) => `<li>${text}</li>`).join("");
  for (const knob of ["schedule", "chunks", "sequence_parallel", "zero_stage", "ep"])
    document.getElementById(knob).closest(".knob").classList.toggle("idle", c[knob] !== asked[knob]);
  verdict.className = `verdict ${{fits: "good", "may fit": ""}[found.fit] ?? "bad"}`;
  verdict.innerHTML = `<strong>Impossible.</strong> ${found.reason}`;
  place.innerHTML = "";
  if (found.reason) return;
  const system = DATA.systems[c.system], {nearest: near} = found, [n, mean, inside] = DATA.shifts[found.shift] ?? [];
  const error = (off) => `${percent(Math.abs(off))} too ${off < 0 ? "fast" : "slow"}`;
  const differs = near && Object.entries(found.sizes).filter(([name, size]) => size !== near.sizes[name]).map(([name]) => `${name} ${near.sizes[name]}`);
  const parts = Object.entries(found.memory);
  verdict.innerHTML = `<strong>${seconds(found.seconds)}</strong> a step
(${seconds(found.low)} to ${seconds(found.high)}: nine of ten) · <strong>MFU ${percent(found.mfu)}</strong> ·
<strong>${found.fit}</strong>: ${gib(found.total)} of ${gib(system.memory)} GiB; runs had ${gib(system.taken[0])} to ${gib(system.taken[1])} GiB besides their tensors`;
  place.innerHTML = `<p class="legend">dp ${c.dp}, ${c.microbatches} microbatches; ${system.hardware}, ${system.stack}, ${DATA.plans[`${c.system} ${c.model}`].model.precision}.</p>
<div class="bar" aria-hidden="true">${parts.map(([, size], i) => `<span class="part p${i}" style="width:${100 * size / Math.max(found.total, system.memory)}%"></span>`).join("")}</div>
<dl class="parts">${parts.map(([name, size], i) => `<div><dt><i class="part p${i}"></i> ${name}</dt><dd>${gib(size)}</dd></div>`).join("")}</dl>
<p class="legend">GiB of the fullest device, as the closed form counts them.</p><h2>Timeline</h2>${drawn(found)}
<h2>How far off it may be</h2><p>Against the steps that ${c.system}'s constants were fitted to, this plan is <strong>${found.shift}</strong>.
${n ? `Published steps of that sort, ${n} in all, were predicted ${mean}% off on average without being fitted to; ${inside}% lay in their interval.` : ""}</p>
<ul>${list(found.kinds)}${list(found.warnings.map((text) => `warning: ${text}`))}</ul>
${near ? `<p>Nearest published step that was not fitted to: ${near.name} (${near.file}), ${seconds(near.seconds)} for a batch of ${near.batch}, predicted ${error(near.off)}${differs.length ? `; there ${differs.join(", ")}` : ""}.</p>` : ""}`;
}

DATA = JSON.parse(document.getElementById("data").textContent);
controls(document.getElementById("knobs"), (chosen) => show(...["verdict", "answer"].map((id) => document.getElementById(id)), chosen));
