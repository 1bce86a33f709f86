// Bundles the libraries of the page, and gathers their licences, in gateway/page/files.

import { build } from "esbuild";
import { readFile, readdir, writeFile } from "node:fs/promises";

const FILES = new URL("../../gateway/page/files/", import.meta.url);
// Of those that lowlight calls common; the rest of them would make the file half as large again.
const LANGUAGES = [
  "bash", "c", "cpp", "csharp", "css", "diff", "go", "ini", "java", "javascript", "json", "kotlin",
  "lua", "makefile", "markdown", "php", "plaintext", "python", "r", "ruby", "rust", "shell", "sql",
  "swift", "typescript", "xml", "yaml",
];
const grammars = LANGUAGES.map((name) => `import ${name} from "highlight.js/lib/languages/${name}";`);
const LIBRARIES = {
  "lib-markdown.js": 'export { default } from "markdown-it";',
  "lib-highlight.js": [
    ...grammars,
    `export const common = { ${LANGUAGES} };`,
    'export { createLowlight } from "lowlight";',
  ].join("\n"),
};

const used = new Set();
for (const [name, contents] of Object.entries(LIBRARIES)) {
  const { metafile, outputFiles } = await build({
    stdin: { contents, resolveDir: import.meta.dirname },
    bundle: true, charset: "utf8", format: "esm", legalComments: "none", metafile: true,
    minify: true, target: "es2022", write: false,
  });
  await writeFile(new URL(name, FILES), outputFiles[0].contents);
  for (const path of Object.keys(metafile.inputs)) {
    const library = path.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)\//)?.[1];
    if (library) used.add(library);
  }
}

const texts = [];
for (const library of [...used].sort()) {
  const folder = new URL(`node_modules/${library}/`, import.meta.url);
  const { version } = JSON.parse(await readFile(new URL("package.json", folder), "utf8"));
  const file = (await readdir(folder)).find((name) => /^licen[cs]e/i.test(name));
  if (!file) throw new Error(`${library} has no licence`);
  texts.push(`${library} ${version}\n\n${(await readFile(new URL(file, folder), "utf8")).trim()}\n`);
}
const head = "The files lib-*.js beside this one contain these libraries.\n";
await writeFile(new URL("LICENSES.txt", FILES), [head, ...texts].join(`\n${"-".repeat(72)}\n\n`));
