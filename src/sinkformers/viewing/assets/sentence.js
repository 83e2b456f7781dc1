// The tokens in their order, as text, each with the colour of its attention.
import { css, readable, shade } from "./colours.js";
import { arrowKeys, element, isolated } from "./dom.js";
import { decimal, tokenLabels } from "./labels.js";
import { onTokens, pointAt } from "./subject.js";

// Make the tokens with the numbers `ids`.
export function makeSentence(state, ids, count) {
  const labels = tokenLabels(state.data, count);
  const chips = ids.map((id) => {
    const point = () => pointAt(state, id);
    const leave = () => pointAt(state, null);
    const pin = () => state.change({ pinned: !state.pinned, focus: { query: id, key: id } });
    const options = {
      type: "button",
      class: "token",
      onpointerenter: point,
      onpointerleave: leave,
      onfocus: point,
      onclick: pin,
    };
    return element("button", options, isolated(labels.short(id)));
  });
  const line = element("p", { class: "sentence", role: "group", "aria-label": "Tokens" }, ...chips);
  arrowKeys(line, () => 1);
  chips.forEach((chip, k) => (chip.tabIndex = k ? -1 : 0));

  function draw(shown, colours) {
    const { values, most, focus } = onTokens(state, shown, count);
    ids.forEach((id, k) => {
      const value = values.get(id);
      const known = value !== undefined && !Number.isNaN(value);
      const share = known ? (state.look.root ? Math.sqrt(value / most) : value / most) : 0;
      const colour = known ? shade(colours, share) : colours.masked;
      Object.assign(chips[k].style, { background: css(colour), color: readable(colour) });
      chips[k].classList.toggle("focus", id === focus);
      chips[k].title = `${labels.full(id)}: ${known ? decimal(value) : "masked"}`;
    });
  }
  return { line, draw };
}
