// Lists the routes of /api/openapi.json and sends requests. Everything shown is set as text, never as markup.
"use strict";

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "onclick") made.addEventListener("click", value);
    else made.setAttribute(name, value);
  }
  for (const child of children) made.append(child);
  return made;
}

function resolve(description, schema) {
  while (schema && schema.$ref) {
    schema = schema.$ref.replace(/^#\//, "").split("/").reduce((at, key) => at[key], description);
  }
  return schema || {};
}

function typeOf(description, schema) {
  const found = resolve(description, schema);
  if (found.enum) return found.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (found.anyOf) return found.anyOf.map((option) => typeOf(description, option)).join(" | ");
  if (found.type === "array") return "list of " + typeOf(description, found.items);
  const bounds = [];
  if (found.minimum !== undefined || found.maximum !== undefined) {
    bounds.push((found.minimum ?? "") + "…" + (found.maximum ?? ""));
  }
  return [found.type || "any", ...bounds].join(" ");
}

function fieldRows(description, schema, prefix) {
  const found = resolve(description, schema);
  const required = new Set(found.required || []);
  const rows = [];
  for (const [name, field] of Object.entries(found.properties || {})) {
    const inner = resolve(description, field);
    rows.push(element("tr", {},
      element("td", {}, element("code", {}, prefix + name)),
      element("td", {}, typeOf(description, field)),
      element("td", {}, required.has(name) ? "required" : field.default !== undefined ? JSON.stringify(field.default) : "")));
    if (inner.properties) rows.push(...fieldRows(description, inner, prefix + name + "."));
  }
  return rows;
}

function example(description, schema) {
  const found = resolve(description, schema);
  const body = {};
  const given = { prompt: "Once upon a time", name: "my worker", models: [], id: "", generation: "" };
  for (const name of found.required || []) body[name] = name in given ? given[name] : null;
  if (found.properties && found.properties.params) body.params = { max_length: 80 };
  return JSON.stringify(body, null, 2);
}

async function send(method, path, operation, inputs, bodyArea, output) {
  let filled = path;
  const query = new URLSearchParams();
  for (const parameter of operation.parameters || []) {
    const value = inputs[parameter.name].value;
    if (parameter.in === "path") filled = filled.replace("{" + parameter.name + "}", encodeURIComponent(value));
    else if (value !== "") query.set(parameter.name, value);
  }
  const headers = { "Client-Agent": "horde-explorer:1:" };
  if (operation.security) headers.apikey = document.getElementById("key").value;
  if (bodyArea) headers["Content-Type"] = "application/json";
  const began = performance.now();
  output.hidden = false;
  output.textContent = "…";
  try {
    const address = filled + (query.size ? "?" + query : "");
    const answer = await fetch(address, { method: method.toUpperCase(), headers, body: bodyArea ? bodyArea.value : undefined });
    const text = await answer.text();
    let shown = text;
    try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* shown as it came */ }
    const took = Math.round(performance.now() - began);
    output.textContent = `${answer.status} ${answer.statusText}, ${took} ms\n\n${shown}`;
  } catch (error) {
    output.textContent = String(error);
  }
}

function route(description, method, path, operation) {
  const inputs = {};
  const fields = (operation.parameters || []).map((parameter) => {
    inputs[parameter.name] = element("input", { spellcheck: "false" });
    return element("label", {}, element("code", {}, parameter.name), ` (${parameter.in}) `, inputs[parameter.name]);
  });
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  const bodyArea = content ? element("textarea", { spellcheck: "false", "aria-label": "body" }) : null;
  if (bodyArea) bodyArea.value = example(description, content.schema);
  const output = element("pre", { hidden: "", "aria-live": "polite" });
  const button = element("button", {
    type: "button",
    onclick: () => send(method, path, operation, inputs, bodyArea, output),
  }, "Send");
  const answers = Object.entries(operation.responses)
    .map(([status, answer]) => element("tr", {}, element("td", {}, status), element("td", {}, answer.description || "")));
  const parts = [element("p", {}, operation.description || ""), ...fields];
  if (bodyArea) parts.push(bodyArea);
  parts.push(button, output);
  if (content) parts.push(element("table", {}, ...fieldRows(description, content.schema, "")));
  parts.push(element("table", {}, ...answers));
  return element("details", {},
    element("summary", {},
      element("span", { class: "method" }, method.toUpperCase()),
      element("code", {}, path), " ",
      element("span", { class: "note" }, operation.summary || "")),
    element("div", {}, ...parts));
}

async function show() {
  const about = document.getElementById("about");
  try {
    const description = await (await fetch("/api/openapi.json")).json();
    about.textContent = `${description.info.title} ${description.info.version}. ${description.info.description}`;
    const groups = new Map();
    for (const [path, operations] of Object.entries(description.paths)) {
      for (const [method, operation] of Object.entries(operations)) {
        const tag = (operation.tags || ["Other"])[0];
        if (!groups.has(tag)) groups.set(tag, []);
        groups.get(tag).push(route(description, method, path, operation));
      }
    }
    const routes = document.getElementById("routes");
    for (const [tag, shown] of groups) routes.append(element("h2", {}, tag), ...shown);
  } catch (error) {
    about.textContent = `The description could not be loaded: ${error}`;
  }
}

show();
