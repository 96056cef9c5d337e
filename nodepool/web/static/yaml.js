// Values as the YAML of a configuration file.

// Texts that YAML would read as something else, or that need quotes.
const PLAIN = /^[A-Za-z/][\w./@+-]*( [\w./@+(),-]+)*$/;
const WORDS = /^(true|false|yes|no|on|off|null|y|n)$/i;

/** @param {unknown} value */
function scalar(value) {
  if (typeof value !== "string") return JSON.stringify(value) ?? "null";
  if (value === "(redacted)") return value;
  return PLAIN.test(value) && !WORDS.test(value) ? value : JSON.stringify(value);
}

/** @param {unknown} value @returns {boolean} */
const isEmpty = (value) => typeof value !== "object" || value === null || !Object.keys(value).length;

/** @param {unknown} value @param {string} indent @returns {string[]} */
function lines(value, indent) {
  if (isEmpty(value)) return [indent + (Array.isArray(value) ? "[]" : typeof value === "object" && value !== null ? "{}" : scalar(value))];
  if (Array.isArray(value)) {
    return value.flatMap((item) => {
      const [first, ...rest] = lines(item, `${indent}  `);
      return [`${indent}- ${first.trimStart()}`, ...rest];
    });
  }
  return Object.entries(/** @type {object} */ (value)).flatMap(([key, item]) => {
    const name = `${indent}${scalar(key)}:`;
    const [first, ...rest] = lines(item, `${indent}  `);
    return isEmpty(item) ? [`${name} ${first.trimStart()}`] : [name, first, ...rest];
  });
}

/** @param {unknown} value */
export const yaml = (value) => lines(value, "").join("\n");
