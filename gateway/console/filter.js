// Filters that people type: a part of the text of a record, or a field and what to compare it with (`total > 100`).

import { textOf, valueOf } from "./payload.js";

const COMPARISON = /^\s*([A-Za-z_$][\w$.[\]-]*)\s*(!=|>=|<=|=|>|<)\s*(.+?)\s*$/;
export const FILTER_HELP = "Part of the text, or a field: total > 100, customer = c-7, items.0.sku != A3";

const plain = (value) => (value !== null && typeof value === "object" && JSON.isRawJSON?.(value) ? Number(value.rawJSON) : value);

// The value at a path of names and indexes in the data of a record; undefined if there is none.
export function fieldOf(data, path) {
  let value = data;
  for (const name of path.replaceAll("[", ".").replaceAll("]", "").split(".")) {
    if (value === null || typeof value !== "object" || !Object.hasOwn(value, name)) return undefined;
    value = value[name];
  }
  return plain(value);
}

function compares(value, operator, wanted) {
  if (value === undefined) return false;
  const isNumeric = typeof value === "number" && wanted.trim() !== "" && !Number.isNaN(Number(wanted));
  const [left, right] = isNumeric ? [value, Number(wanted)] : [typeof value === "string" ? value : JSON.stringify(value), wanted.replace(/^"(.*)"$/, "$1")];
  return { "=": left === right, "!=": left !== right, ">": left > right, "<": left < right, ">=": left >= right, "<=": left <= right }[operator];
}

// A function that says whether a record matches; null if the text asks for nothing.
export function filterOf(text, isStream) {
  if (!text.trim()) return null;
  const parts = COMPARISON.exec(text);
  if (parts) return (record) => compares(fieldOf(valueOf(record, isStream), parts[1]), parts[2], parts[3]);
  const wanted = text.toLowerCase();
  return (record) => `${record.$tag ?? ""} ${record.meta ? JSON.stringify(record.meta) : ""} ${isStream ? textOf(record) : JSON.stringify(record.data)}`.toLowerCase().includes(wanted);
}
