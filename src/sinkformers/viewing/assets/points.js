// Points with the colour of their attention, turned by dragging or by the arrow keys.
import { css, shade } from "./colours.js";
import { element } from "./dom.js";
import { onTokens, pointAt } from "./subject.js";

const SIDE = 420; // pixels
const NEAR = 14; // pixels between the pointer and a point that it points at

export function makePoints(state) {
  const places = state.data.subject.places;
  const canvas = element("canvas", {
    class: "points",
    tabindex: 0,
    role: "img",
    width: 2 * SIDE,
    height: 2 * SIDE,
    "aria-label": "The points: point at one; drag, or use the arrow keys, to turn them",
  });
  let [turn, tilt] = [-0.6, 0.35];
  let dragged = null;
  let drawn = null;
  let projected = [];

  function project() {
    const [sin, cos] = [Math.sin(turn), Math.cos(turn)];
    const [up, away] = [Math.cos(tilt), Math.sin(tilt)];
    projected = places.map(([x, y, z], id) => {
      const [across, deep] = [cos * x - sin * y, sin * x + cos * y];
      return {
        id,
        x: SIDE * (0.5 + 0.47 * across),
        y: SIDE * (0.5 - 0.47 * (up * z + away * deep)),
        depth: up * deep - away * z,
      };
    });
    projected.sort((a, b) => b.depth - a.depth);
  }

  function nearest(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [((event.clientX - box.left) / box.width) * SIDE, ((event.clientY - box.top) / box.height) * SIDE];
    let [found, least] = [null, NEAR ** 2];
    for (const point of projected) {
      const distance = (point.x - x) ** 2 + (point.y - y) ** 2;
      if (distance <= least) [found, least] = [point.id, distance];
    }
    return found;
  }

  const turnBy = (x, y) => {
    turn += x;
    tilt = Math.min(1.57, Math.max(-1.57, tilt + y));
    project();
    if (drawn) draw(...drawn);
  };
  canvas.addEventListener("pointerdown", (event) => {
    dragged = { x: event.clientX, y: event.clientY, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!dragged) return pointAt(state, nearest(event));
    const [x, y] = [event.clientX - dragged.x, event.clientY - dragged.y];
    if (Math.abs(x) + Math.abs(y) < 3 && !dragged.moved) return undefined;
    Object.assign(dragged, { x: event.clientX, y: event.clientY, moved: true });
    return turnBy(x / 150, y / 150);
  });
  canvas.addEventListener("pointerup", (event) => {
    const id = dragged && !dragged.moved ? nearest(event) : null;
    dragged = null;
    if (id !== null) state.change({ pinned: !state.pinned, focus: { query: id, key: id } });
  });
  canvas.addEventListener("pointerleave", () => pointAt(state, null));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: [0.15, 0], ArrowLeft: [-0.15, 0], ArrowUp: [0, 0.15], ArrowDown: [0, -0.15] }[event.key];
    if (!step) return;
    event.preventDefault();
    turnBy(...step);
  });

  function draw(shown, colours) {
    drawn = [shown, colours];
    const { values, most, focus } = onTokens(state, shown, places.length);
    const context = canvas.getContext("2d");
    context.setTransform(2, 0, 0, 2, 0, 0);
    context.clearRect(0, 0, SIDE, SIDE);
    for (const { id, x, y, depth } of projected) {
      const value = values.get(id);
      const known = value !== undefined && !Number.isNaN(value);
      const share = known ? (state.look.root ? Math.sqrt(value / most) : value / most) : 0;
      context.beginPath();
      context.arc(x, y, (places.length > 400 ? 3 : 5) * (1 - 0.25 * depth), 0, 2 * Math.PI);
      context.fillStyle = known ? css(shade(colours, share)) : colours.rule;
      context.strokeStyle = id === focus ? colours.even : colours.faint;
      context.lineWidth = id === focus ? 3 : 0.4;
      context.fill();
      context.stroke();
    }
  }
  project();
  return { line: canvas, draw };
}
