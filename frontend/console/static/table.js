// Tables whose rows come and go: a row keeps its element as long as it is there, so that selections stay.

import { make, setText } from "./dom.js";

export class Table {
  /** `columns`: [{title, text(row), class, hint, share(row): 0 to 1, shown as a bar}] */
  constructor(element, columns, nothing) {
    this.columns = columns;
    this.nothing = nothing;
    this.rows = new Map();
    this.body = make("tbody");
    const heads = columns.map(({ title, hint, class: kind }) => make("th", { scope: "col", title: hint, class: kind }, title));
    element.append(make("thead", {}, make("tr", {}, ...heads)), this.body);
    this.empty = make("tr", { class: "empty" }, make("td", { colspan: columns.length }, nothing));
    this.update([]);
  }

  /** `rows`: objects with a `rowKey` that no other has. */
  update(rows) {
    const before = this.rows;
    this.rows = new Map();
    for (const row of rows) {
      const element = before.get(row.rowKey) ?? this.make();
      this.rows.set(row.rowKey, element);
      this.columns.forEach((column, at) => this.fill(element.cells[at], column, row));
    }
    const wanted = rows.length ? [...this.rows.values()] : [this.empty];
    if (wanted.length !== this.body.rows.length || wanted.some((element, at) => this.body.rows[at] !== element)) {
      this.body.replaceChildren(...wanted);
    }
  }

  make() {
    return make(
      "tr",
      {},
      ...this.columns.map(({ class: kind, share }) =>
        share ? make("td", { class: kind }, make("span"), make("progress", { max: 1 })) : make("td", { class: kind }),
      ),
    );
  }

  fill(cell, { text, share, state }, row) {
    setText(share ? cell.firstChild : cell, text(row));
    if (state) cell.dataset.state = state(row);
    if (share) cell.lastChild.value = share(row);
  }
}
