// Bundles src/ into the folder that is named (../static by default): app.js, one IIFE, and app.css.
import { build } from "esbuild";

await build({
  entryPoints: { app: "src/main.tsx" },
  outdir: process.argv[2] ?? "../static",
  bundle: true,
  format: "iife",
  target: "es2022",
  minify: true,
  charset: "utf8",
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  banner: { js: "/* Bundles preact, @preact/signals and uPlot, each under the MIT licence. */" },
});
