// A pasted log line or stack holds characters that mean something to the search: quotation marks ask for all
// words, a colon names a field.  What is pasted is reduced to its words.  Paths go, since every stack has the same
// ones; so do short words, which the search takes for the beginnings of longer ones.
function pastedWords(text) {
  const words = text
    .replace(/\u001b\[[0-9;]*m/g, " ")
    .replace(/\S*\/\S*/g, " ")
    .replace(/->|["'`*+~^:|\\/<>()[\]{}=,;#!?]+/g, " ")
    .split(/\s+/)
    .map((word) => word.replace(/^[-.]+|[-.]+$/g, ""))
    .filter((word) => /[a-z]/i.test(word) && word.length > 3);
  return [...new Set(words)].join(" ");
}

if (typeof document !== "undefined") {
  document.addEventListener(
    "paste",
    (event) => {
      const field = event.target;
      if (!(field instanceof HTMLInputElement) || !field.matches("[data-md-component=search-query]")) return;
      event.preventDefault();
      field.setRangeText(pastedWords(event.clipboardData.getData("text")), field.selectionStart, field.selectionEnd, "end");
      field.dispatchEvent(new Event("keyup", { bubbles: true })); // what the search listens to
    },
    true,
  );
}
