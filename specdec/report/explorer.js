// The view of the tree explorer: it draws what Python sends and tells Python what was clicked or typed.
// Zoom, scrolling and tips are its own; everything else is decided in Python.

const KEYS = { ArrowRight: { do: "step", by: 1 }, ArrowLeft: { do: "step", by: -1 }, Home: { do: "go", cycle: 0 } };
KEYS.End = { do: "go", cycle: 1e6 };
KEYS[" "] = { do: "play" };
KEYS.f = { do: "fold" };
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

function laneBox(root, number, zooms, send) {
  const lane = make("lane", root);
  const text = make("text", lane), draft = make("draft", lane), answers = make("answers", lane);
  const parts = { lane, text, answers, tools: make("tools", draft), tree: make("tree", draft) };
  for (const [words, factor, tip] of [["−", 0.8, "smaller"], ["+", 1.25, "larger"], ["1:1", "one", "as it is"], ["fit", "fit", "all of it"]]) {
    const button = document.createElement("button");
    Object.assign(button, { textContent: words, title: tip });
    button.onclick = () => { zoomed(parts.tree, factor); zooms[number] = parts.tree.dataset.zoom; };
    parts.tools.append(button);
  }
  parts.counts = make("counts", parts.tools);
  parts.tree.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    zoomed(parts.tree, event.deltaY < 0 ? 1.15 : 1 / 1.15);
    zooms[number] = parts.tree.dataset.zoom;
  }, { passive: false });
  parts.tree.addEventListener("dblclick", (event) => {
    const node = event.target.dataset?.node;
    if (Number(node) > 0) send({ do: "fold", lane: number, node: Number(node) });
  });
  drag(parts.tree);
  return parts;
}

function fill(parts, shown, zoom) {
  parts.text.innerHTML = shown.text || "";
  parts.tree.innerHTML = shown.tree || "";
  parts.answers.innerHTML = shown.answers || "";
  const facts = shown.facts;
  parts.counts.textContent = facts ? `${shown.name}: ${facts.drafted} drafted, ${facts.verified} verified, ${facts.accepted} accepted` : shown.name;
  parts.tools.style.display = shown.tree ? "" : "none";
  parts.tree.style.display = shown.tree ? "" : "none";
  const picture = parts.tree.querySelector("svg");
  if (!picture) return;
  const width = picture.viewBox.baseVal.width;
  parts.lane.classList.toggle("wide", width > parts.text.clientWidth);  // then it may lie below the answers, too
  parts.tree.dataset.zoom = zoom || Math.max(0.75, Math.min(1, (parts.tree.clientWidth - 16) / width));
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
  const message = make("message", root), prompt = make("prompt", root), lanes = make("lanes", root);
  const time = make("time", root), tip = make("tip", root);
  message.setAttribute("role", "status");
  const boxes = [], zooms = {};
  const send = (what) => model.send(what);

  const draw = () => {
    const begin = performance.now(), page = model.get("page");
    root.classList.remove("gone");
    message.textContent = page.message || "";
    prompt.textContent = page.prompt ? `Prompt: ${page.prompt}` : "";
    const shown = page.lanes || [];
    while (boxes.length > shown.length) boxes.pop().lane.remove();
    while (boxes.length < shown.length) boxes.push(laneBox(lanes, boxes.length, zooms, send));
    root.dataset.lanes = shown.length;
    shown.forEach((one, number) => fill(boxes[number], one, zooms[number]));
    time.innerHTML = page.time || "";
    root.getBoundingClientRect();  // the layout belongs to the time of drawing
    root.dataset.drawn = Number(root.dataset.drawn || 0) + 1;
    root.dataset.drawMs = (performance.now() - begin).toFixed(1);
  };
  const measure = () => {
    const width = Math.floor(root.clientWidth);
    if (width > 300 && Math.abs(width - model.get("width")) > 8) { model.set("width", width); model.save_changes(); }
  };
  const lost = () => { message.textContent = GONE; root.classList.add("gone"); };

  root.addEventListener("keydown", (event) => {
    const zoom = { "+": 1.25, "-": 0.8, 0: "fit" }[event.key];
    if (zoom) boxes.forEach((parts, number) => { zoomed(parts.tree, zoom); zooms[number] = parts.tree.dataset.zoom; });
    else if (KEYS[event.key]) send(KEYS[event.key]);
    else return;
    event.preventDefault();
    event.stopPropagation();
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
    if (event.target.dataset?.kind === "cycle") send({ do: "go", cycle: Number(event.target.dataset.node) });
  });
  model.on("change:page", draw);
  model.on("comm_live_update", lost);  // a kernel that comes back draws anew
  model.on("comm:close", lost);
  const watcher = new ResizeObserver(measure);
  watcher.observe(root);
  draw();
  return () => watcher.disconnect();
}

export default { render };
