//! Writes the files of a report.

use std::borrow::Cow;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use aws_lc_rs::digest::{SHA256, digest};

/// The names and contents of a report's files.
#[derive(Clone, Debug, Default)]
pub struct Files(Vec<(Cow<'static, str>, Vec<u8>)>);

impl Files {
    /// The files that every report has: results and page.
    pub fn new(json: String, page: String) -> Self {
        Self(vec![("results.json".into(), json.into_bytes()), ("index.html".into(), page.into_bytes())])
    }

    /// Adds a file.
    pub fn with(mut self, name: impl Into<Cow<'static, str>>, contents: Vec<u8>) -> Self {
        self.0.push((name.into(), contents));
        self
    }

    /// Writes the files, and `SHA256SUMS` for `sha256sum --check`.
    pub fn write(&self, out: &Path) -> Result<()> {
        let mut sums = String::new();
        for (name, contents) in &self.0 {
            write(out, name, contents)?;
            let sum: String =
                digest(&SHA256, contents).as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
            // Writing to a string cannot fail.
            let _ = writeln!(sums, "{sum}  {name}");
        }
        write(out, "SHA256SUMS", sums.as_bytes())
    }
}

fn write(out: &Path, name: &str, contents: &[u8]) -> Result<()> {
    let path = out.join(name);
    std::fs::write(&path, contents).with_context(|| format!("cannot write {}", path.display()))
}
