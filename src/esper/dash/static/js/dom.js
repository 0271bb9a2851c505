// Elements, made of text and never of markup.

/** An element. Properties that start with "on" are listeners, plain names are properties, others are attributes. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** A table; a cell is text, a node, or a number, which stands on the right. */
export function table(heads, rows, caption) {
  const cell = (tag, content, number) => element(tag, number ? { className: "number" } : {}, content ?? "");
  const numeric = heads.map((_, column) => rows.some((row) => row[column]?.number));
  const body = rows.map((row) =>
    element("tr", {}, row.map((one, column) => cell("td", one?.text ?? one, numeric[column]))),
  );
  const top = element("tr", {}, heads.map((head, column) => cell("th", head, numeric[column])));
  return element(
    "div",
    { className: "scroll", tabIndex: 0, role: "region", "aria-label": caption },
    element("table", {}, element("thead", {}, top), element("tbody", {}, body)),
  );
}

/** A cell of a table that stands on the right. */
export const figure = (text) => ({ text, number: true });

/** A titled box. */
export function card(title, note, ...content) {
  const words = note ? element("p", { className: "note" }, note) : null;
  return element("section", { className: "card", "aria-label": title }, element("h2", {}, title), words, ...content);
}

/** Why there is nothing to show. */
export function empty(sentence, command) {
  const code = command ? [element("br"), element("code", {}, command)] : [];
  return element("p", { className: "empty" }, sentence, ...code);
}

/** A labelled choice; options are pairs of value and text. */
export function choice(label, options, value, onchange) {
  const select = element(
    "select",
    { onchange: () => onchange(select.value) },
    options.map(([key, text]) => element("option", { value: key, selected: key === value }, text)),
  );
  return element("label", {}, label, select);
}
