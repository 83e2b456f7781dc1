// Elements of the page. Texts are set as text, and never as HTML.

// Make an element: attributes, listeners ("on…") and properties of `style` by name, then children.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(made.style, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

// Text in a direction of its own, so that tokens of right-to-left scripts do not reorder what is around them.
export const isolated = (text) => element("bdi", {}, text);

export function table(caption, header, rows) {
  const cell = (tag) => (content) => element(tag, tag === "th" ? { scope: "col" } : {}, content);
  const body = rows.map((cells) =>
    element("tr", {}, ...cells.map((content, k) => (k ? cell("td")(content) : rowHead(content)))),
  );
  return element(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    element(
      "table",
      {},
      element("caption", {}, caption),
      element("thead", {}, element("tr", {}, ...header.map(cell("th")))),
      element("tbody", {}, ...body),
    ),
  );
}

const rowHead = (content) => element("th", { scope: "row" }, content);

// A closed element that opens to the table behind a picture, which is made when it is opened and kept up to date.
export function tableBehind(summary, make) {
  const body = element("div");
  const details = element("details", { class: "behind" }, element("summary", {}, summary), body);
  const update = () => {
    if (details.open) body.replaceChildren(make());
  };
  details.addEventListener("toggle", update);
  return { details, update };
}

// Focus of several elements by arrow keys, of which one at a time can be reached by Tab.
export function arrowKeys(container, columns, choose) {
  container.addEventListener("keydown", (event) => {
    const items = [...container.querySelectorAll("button")];
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() };
    const from = items.indexOf(document.activeElement);
    const next = items[from + (steps[event.key] ?? NaN)];
    if (from < 0 || !next) return;
    event.preventDefault();
    next.focus();
    choose?.(next);
  });
}
