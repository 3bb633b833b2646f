// Text of a model as markdown: parsed without HTML, then cleaned all the same, since models write what strangers ask for.
import MarkdownIt from "./vendor/markdown-it.js";
import DOMPurify from "./vendor/purify.js";

const markdown = new MarkdownIt({ html: false, linkify: true, typographer: false, breaks: true });
// Nothing is loaded because an answer names it: a picture is shown as the link that it is.
markdown.renderer.rules.image = (tokens, at) => {
  const source = markdown.utils.escapeHtml(tokens[at].attrGet("src") ?? "");
  const text = markdown.utils.escapeHtml(tokens[at].content || "picture");
  return `<a href="${source}">${text}</a>`;
};

const ALLOWED = {
  ALLOWED_TAGS: ["a", "p", "br", "hr", "em", "strong", "s", "del", "code", "pre", "blockquote", "ul", "ol", "li", "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td"],
  ALLOWED_ATTR: ["href", "start"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  // An answer's headings stand below the page's own; a wide table or listing can be scrolled by keyboard.
  if (node.tagName === "PRE" || node.tagName === "TABLE") node.setAttribute("tabindex", "0");
});

export function render(text) {
  return DOMPurify.sanitize(markdown.render(text), ALLOWED);
}
