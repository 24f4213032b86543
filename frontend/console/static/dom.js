// Elements without markup in strings: text goes in as text, whatever it contains.

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; a child that is no node becomes text. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Set text only where it differs, so that nothing is drawn or read out anew without need. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
