// The view of the tree explorer: it draws what Python sends and tells Python what was clicked or typed.
// Zoom, scrolling and tips are its own; everything else is decided in Python.

const HELP = "Keys: arrow right and left for the next and previous cycle.";
const GONE = "The kernel behind this view has gone, so nothing here can be redrawn. Run the cell again.";

function make(name, parent, words) {
  const element = document.createElement("div");
  element.className = name;
  if (words) element.textContent = words;
  parent.append(element);
  return element;
}

function zoomed(box, factor) {
  const picture = box.querySelector("svg");
  if (!picture) return;
  const { width, height } = picture.viewBox.baseVal;
  const whole = Math.min(1, (box.clientWidth - 4) / width, (box.clientHeight - 4) / height);
  const old = Number(box.dataset.zoom || 1);
  const zoom = factor === "fit" ? whole : factor === "one" ? 1 : Math.min(3, Math.max(0.1, old * factor));
  box.dataset.zoom = zoom;
  picture.setAttribute("width", width * zoom);
  picture.setAttribute("height", height * zoom);
}

function drag(box) {
  box.addEventListener("pointerdown", (event) => {
    const from = { x: event.clientX + box.scrollLeft, y: event.clientY + box.scrollTop };
    const move = (now) => {
      box.scrollLeft = from.x - now.clientX;
      box.scrollTop = from.y - now.clientY;
    };
    const end = () => window.removeEventListener("pointermove", move);
    window.addEventListener("pointermove", move);
    window.addEventListener("pointerup", end, { once: true });
  });
}

function button(parent, words, tip) {
  const made = document.createElement("button");
  Object.assign(made, { type: "button", textContent: words, title: tip });
  made.setAttribute("aria-label", tip);
  parent.append(made);
  return made;
}

// One control, as Python describes it: [name, kind, label, tip]. What people do to it sets the trait of its name.
function control(parent, [name, kind, label, tip], model, acts) {
  const made = { name, kind, label, touched: 0 };
  if (["button", "back", "forth"].includes(kind)) {
    made.input = button(parent, label, tip);
    made.input.onclick = acts[kind] || (() => model.send({ do: name }));
    return made;
  }
  const box = document.createElement("label");
  box.className = `control ${kind} ${name}`;
  box.title = tip;
  const words = document.createElement("span");
  words.textContent = label;
  const input = made.input = document.createElement({ choice: "select", text: "textarea" }[kind] || "input");
  input.setAttribute("aria-label", tip);
  if (input.tagName === "INPUT") input.type = { check: "checkbox", number: "number", slider: "range" }[kind];
  if (kind === "check") box.append(input, words);
  else box.append(words, input);
  if (kind === "slider") box.append(made.number = document.createElement("output"));
  input.addEventListener(kind === "slider" ? "input" : "change", () => {
    made.touched = performance.now();
    const listed = model.get("choices")[name];
    const typed = { check: input.checked, text: input.value }[kind] ?? Number(input.value);
    model.set(name, listed ? listed[typed][1] : typed);
    model.save_changes();
  });
  parent.append(box);
  return made;
}

function fillControl(made, model) {
  const { name, kind, label, input } = made;
  if (name === "start" || name === "stop") input.disabled = model.get("running") === (name === "start");
  if (["button", "back", "forth"].includes(kind)) return;
  const listed = model.get("choices")[name], value = model.get(name);
  const place = listed ? listed.findIndex((choice) => choice[1] === value) : value;
  const [low, high] = listed ? [0, listed.length - 1] : model.get("limits")[name] || [];
  if (kind === "choice" && input.options.length !== listed.length) {
    input.replaceChildren(...listed.map((choice, number) => new Option(choice[0], number)));
  }
  if (kind === "slider" || kind === "number") { input.min = low; input.max = high; }
  if (kind === "slider") {
    made.number.textContent = listed ? listed[place][0] : name === "cycle" ? `${value}/${high}` : value;
    input.setAttribute("aria-valuetext", made.number.textContent);
  }
  // What a hand has just moved is ahead of what Python knows.
  if (input === input.getRootNode().activeElement && performance.now() - made.touched < 800) return;
  if (kind === "check") input.checked = value;
  else if (input.value !== String(place)) input.value = place;
}

function draftBox(root) {
  const lane = make("lane", root);
  const draft = make("draft", lane), answers = make("answers", lane);
  const parts = { lane, answers, counts: make("counts", draft), tree: make("tree", draft) };
  for (const [box, words] of [[parts.tree, "draft tree"], [answers, "answers of the policy"]]) {
    box.tabIndex = 0;  // so that keys can scroll it
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", words);
  }
  parts.tree.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoomed(parts.tree, event.deltaY < 0 ? 1.15 : 1 / 1.15);
  }, { passive: false });
  drag(parts.tree);
  return parts;
}

function fill(parts, page) {
  parts.tree.innerHTML = page.tree || "";
  parts.answers.innerHTML = page.answers || "";
  parts.counts.textContent = page.counts || "";
  parts.lane.classList.toggle("empty", !page.tree);
  const picture = parts.tree.querySelector("svg");
  if (!picture) return;
  const width = picture.viewBox.baseVal.width;
  parts.tree.dataset.zoom ||= Math.max(0.75, Math.min(1, (parts.tree.clientWidth - 16) / width));
  zoomed(parts.tree, 1);
  inSight(parts.tree);
}

function inSight(box) {  // the accepted path, or as much of its end as there is room for
  const scale = Number(box.dataset.zoom);
  const path = [...box.querySelectorAll('[data-kind="accepted"],[data-kind="bonus"],[data-kind="root"]')];
  const places = path.map((node) => node.getBBox());
  const top = Math.min(...places.map((one) => one.y)) * scale, right = Math.max(...places.map((one) => one.x + one.width)) * scale;
  const height = Math.max(...places.map((one) => one.y + one.height)) * scale - top;
  box.scrollTop = height < box.clientHeight ? top - (box.clientHeight - height) / 2 : top - 24;
  box.scrollLeft = right - box.clientWidth + 24;
}

function render({ model, el }) {
  const root = make("specdec-explorer", el);
  root.tabIndex = 0;
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", `Draft trees, one cycle at a time. ${HELP}`);
  const given = make("given", root), bar = make("bar", root);
  const status = make("status", root), message = make("message", status), tools = make("tools", status);
  const prompt = document.createElement("details"), summary = document.createElement("summary");
  prompt.className = "prompt";
  prompt.append(summary);
  const text = make("text", root), time = make("time", root), lanes = make("lanes", root), tip = make("tip", root);
  message.setAttribute("role", "status");
  tools.setAttribute("role", "toolbar");
  tools.setAttribute("aria-label", "size of the trees");
  const box = draftBox(lanes), controls = [];

  const go = (cycle) => {
    const [low, high] = model.get("limits").cycle || [1, 1];
    model.set("cycle", Math.min(high, Math.max(low, cycle)));
    model.save_changes();
  };
  const step = (by) => go(model.get("cycle") + by);
  const fillControls = () => controls.forEach((made) => fillControl(made, model));
  const acts = { back: () => step(-1), forth: () => step(1) };
  const keys = { ArrowRight: acts.forth, ArrowLeft: acts.back };

  for (const described of model.get("controls")) {
    controls.push(control(described[4] === "prompt" ? given : bar, described, model, acts));
  }
  given.append(prompt);
  for (const [words, factor, what] of [["−", 0.8, "smaller"], ["+", 1.25, "larger"], ["1:1", "one", "as it is"], ["fit", "fit", "all of it"]]) {
    button(tools, words, what).onclick = () => zoomed(box.tree, factor);
  }
  const draw = () => {
    const begin = performance.now(), page = model.get("page");
    root.classList.remove("gone");
    fillControls();
    message.textContent = page.message || "";
    summary.textContent = page.prompt ? `Prompt: ${page.prompt}` : "";
    text.innerHTML = page.text || "";
    time.innerHTML = page.time || "";
    fill(box, page);
    const now = text.querySelector('[data-kind="bonus"],[data-kind="accepted"],[data-kind="root"]');
    if (now) text.scrollTop = now.getBBox().y - 30;
    root.getBoundingClientRect();  // the layout belongs to the time of drawing
    root.dataset.drawn = Number(root.dataset.drawn || 0) + 1;
    root.dataset.drawMs = (performance.now() - begin).toFixed(1);
  };
  const lost = () => { message.textContent = GONE; root.classList.add("gone"); };

  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    event.stopPropagation();  // else the page around would take it: `d d` deletes a cell
    if (event.target.matches("input, select, textarea, button, summary")) return;
    if (!keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
  });
  root.addEventListener("mousemove", (event) => {
    const words = event.target.dataset?.tip;
    tip.style.display = words ? "block" : "none";
    if (!words) return;
    const frame = root.getBoundingClientRect();
    tip.textContent = words;
    tip.style.left = `${Math.min(event.clientX - frame.left + 14, frame.width - tip.offsetWidth - 4)}px`;
    tip.style.top = `${event.clientY - frame.top + 16}px`;
  });
  root.addEventListener("mouseleave", () => { tip.style.display = "none"; });
  time.addEventListener("click", (event) => {
    if (event.target.dataset?.kind === "cycle") go(Number(event.target.dataset.node) + 1);
  });
  model.on("change:page", draw);
  model.on("change", fillControls);
  model.on("comm_live_update", lost);  // a kernel that comes back draws anew
  model.on("comm:close", lost);
  draw();
}

export default { render };
