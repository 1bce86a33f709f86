// The settings of a model, as its configuration has them: the daemon says which there are, and what they do.

import { get, post, why } from "./api.js";
import { make, sentence, write } from "./view.js";

/**
 * Shows the settings of a model in a window of its own.
 *
 * @param name the model.
 * @returns a promise of what has happened, in a sentence; empty if nothing has.
 */
export async function configured(name) {
  const { settings, config_path: path } = await get("/page/settings", { model: name });
  if (!path) return "mlxsup runs without a configuration file, so settings cannot be kept. Run mlxsup init to write one, and start mlxsup again.";
  const inputs = new Map();
  const field = (one) => {
    inputs.set(one, inputOf(one, `setting-${inputs.size}`));
    return fieldOf(one, inputs.get(one));
  };
  const isSampling = ({ key }) => key.includes(".sampling.");
  const trouble = make("p", { role: "alert", class: "notice" });
  const cancel = make("button", { type: "button" }, "Cancel");
  const save = make("button", { type: "submit" }, "Save");
  const form = make("form", { class: "wide" }, make("h2", { id: "settings-title" }, `Settings of ${name}`),
    make("p", { class: "quiet" }, "What you leave empty keeps its usual value. If a change needs a restart, the model finishes its answers first."),
    make("div", { class: "fields" }, ...settings.filter((one) => !isSampling(one)).map(field)),
    make("details", {}, make("summary", {}, "Sampling, where a request does not set it"),
      make("div", { class: "fields" }, ...settings.filter(isSampling).map(field))),
    make("div", { class: "foot" }, trouble, make("p", { class: "row" }, save, cancel)));
  const dialog = make("dialog", { "aria-labelledby": "settings-title" }, form);
  cancel.addEventListener("click", () => dialog.close());
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const changes = {};
    for (const [{ key, value }, input] of inputs) {
      const text = input.value.trim();
      if (text !== value) changes[key] = text || null;
    }
    if (!Object.keys(changes).length) return dialog.close();
    if (save.ariaBusy) return undefined;
    save.ariaBusy = "true";
    write(trouble, "");
    try {
      await post("/page/models/configure", { model: name, changes });
      dialog.close("saved");
    } catch (error) {
      write(trouble, sentence(plain(why(error), settings)));
    } finally {
      save.ariaBusy = null;
    }
    return undefined;
  });
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((answer) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      answer(dialog.returnValue === "saved" ? `Saved in ${path}.` : "");
    });
  });
}

function inputOf({ key, value, default: usual, choices }, id) {
  if (!choices.length) {
    const placeholder = usual || (key.includes(".sampling.") ? "the model's own value" : "none");
    return make("input", { id, value, placeholder, autocomplete: "off", spellcheck: "false", maxlength: "512" });
  }
  const words = { true: "Yes", false: "No" };
  const select = make("select", { id }, make("option", { value: "" }, `As usual: ${words[usual] ?? usual}`),
    ...choices.map((choice) => make("option", { value: choice }, words[choice] ?? choice)));
  select.value = value;
  return select;
}

function fieldOf({ label, does }, input) {
  const hint = `${input.id}-hint`;
  input.setAttribute("aria-describedby", hint);
  return make("p", { class: "field" }, make("label", { for: input.id }, label), input,
    make("span", { id: hint, class: "quiet hint" }, does));
}

/** An error with the labels of the settings in place of their keys. */
function plain(text, settings) {
  return settings.reduce((said, { key, label }) => said.replaceAll(key, label), text).replace(/; nothing was changed$/, "");
}
