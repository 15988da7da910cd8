"use strict";
// Text reaches the page by textContent only. The key stays in this variable and goes with the page.
let key = "";
let model = "";
let running = null;

const at = (id) => document.getElementById(id);
const headers = () => (key ? { Authorization: "Bearer " + key } : {});
const time = (s) => (s === null ? "–" : s < 1 ? (s * 1000).toFixed(1) + " ms" : s.toFixed(2) + " s");

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function row(name, p) {
  const made = element("tr");
  const head = element("th", name);
  head.scope = "row";
  made.append(head, ...[p.p50, p.p90, p.p99].map((s) => element("td", time(s))), element("td", p.count));
  return made;
}

function gauge(label, value, max) {
  const line = element("p");
  const meter = element("meter");
  meter.max = Math.max(max, 1);
  meter.value = value;
  meter.setAttribute("aria-label", label);
  line.append(element("span", label + " "), meter, element("span", " " + value + " / " + max));
  return line;
}

function card(one) {
  const load = one.load;
  const made = element("li");
  made.append(
    element("h3", one.name),
    element("p", one.role + ", " + one.state + ", tp " + one.tp + ", dp " + one.dp, one.state === "ready" ? "" : "bad"),
    gauge("Pages in use", load.total_pages - load.free_pages, load.total_pages),
    gauge(one.role === "decode" ? "Batch" : "Queue", one.role === "decode" ? load.running : load.waiting, one.max_batch),
    element("p", "running " + load.running + ", waiting " + load.waiting + ", of this router " + one.attempts),
  );
  if (one.role === "prefill") made.append(element("p", "prefill tokens queued " + load.queued_prefill_tokens));
  if (load.step_s !== null) made.append(element("p", "step " + time(load.step_s)));
  return made;
}

function request(one) {
  const made = element("li");
  const path = one.decoder === null ? "" : (one.prefiller ?? "alone") + " → " + one.decoder + ", ";
  const tokens = one.prompt_tokens + " + " + (one.output_tokens ?? "?") + " tokens";
  made.append(
    element("span", one.outcome + ", " + path + tokens + ", total " + time(one.total_s) + ", TTFT " + time(one.ttft_s) +
      " (queue " + time(one.queue_s) + ", prefill wait " + time(one.kv_wait_s) + ", first step " + time(one.first_step_s) +
      "), stream " + time(one.stream_s), one.outcome === "ok" ? "" : "bad"),
  );
  const before = one.queue_s + (one.kv_wait_s ?? 0) + (one.first_step_s ?? 0);
  const other = Math.max(0, one.total_s - before - (one.stream_s ?? 0));
  const bar = element("div", undefined, "bar");
  bar.setAttribute("aria-hidden", "true");
  for (const [name, s] of [["queue", one.queue_s], ["kv", one.kv_wait_s], ["step", one.first_step_s], ["other", other], ["stream", one.stream_s]]) {
    const part = element("span", undefined, name);
    part.style.flex = String(s ?? 0) + " 1 0";
    bar.append(part);
  }
  made.append(bar);
  return made;
}

function say(id, text) {
  if (at(id).textContent !== text) at(id).textContent = text;
}

function show(state) {
  model = state.model;
  say("model", state.model);
  say("status", state.reason === null ? "Ready" : "Not ready: " + state.reason);
  at("queue").max = Math.max(state.max_queue, 1);
  at("queue").value = state.queued;
  say("queue-text", state.queued + " / " + state.max_queue);
  say("running", String(state.running));
  at("percentiles").replaceChildren(row("TTFT", state.ttft), row("ITL", state.itl));
  at("instances").replaceChildren(...state.instances.map(card));
  const hidden = state.instances_total - state.instances.length;
  say("more", hidden > 0 ? "and " + hidden + " more" : "");
  at("pairs").replaceChildren(...state.pairs.map(([p, d]) => element("li", p + " → " + d)));
  at("requests").replaceChildren(...state.requests.reverse().map(request));
}

async function poll() {
  try {
    const answer = await fetch("/console/state", { headers: headers(), signal: AbortSignal.timeout(5000) });
    at("key-form").hidden = answer.status !== 401;
    if (answer.ok) show(await answer.json());
    else say("status", answer.status === 401 ? "An API key is needed" : "The router answered " + answer.status);
  } catch {
    say("status", "The router does not answer");
  }
  setTimeout(poll, 1000);
}

function take(event) {
  const lines = event.split("\n");
  const data = lines.filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
  if (!data || data === "[DONE]") return data === "[DONE]";
  const body = JSON.parse(data);
  if (lines.includes("event: error")) throw new Error(body.error.message);
  for (const choice of body.choices ?? []) {
    const text = choice.delta.content ?? "";
    if (text) at("answer").append(text);
  }
  return false;
}

async function read(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", done = false;
  for (;;) {
    const part = await reader.read();
    if (part.done) break;
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) done = take(event) || done;
  }
  if (!done) throw new Error("the answer ended early");
}

async function send(event) {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  at("answer").textContent = at("chat-error").textContent = "";
  at("send").disabled = true;
  at("stop").disabled = false;
  const body = { model, stream: true, max_tokens: Number(at("max").value), messages: [{ role: "user", content: at("prompt").value }] };
  try {
    const answer = await fetch("/v1/chat/completions", {
      method: "POST", headers: { "Content-Type": "application/json", ...headers() }, body: JSON.stringify(body), signal: running.signal,
    });
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    await read(answer);
  } catch (error) {
    if (error.name !== "AbortError") at("chat-error").textContent = error.message;
  } finally {
    running = null;
    at("send").disabled = false;
    at("stop").disabled = true;
  }
}

at("chat").addEventListener("submit", send);
at("stop").addEventListener("click", () => running?.abort());
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  at("key").value = "";
});
poll();
