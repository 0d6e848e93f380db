//! `headwater demo`: runs the demo of the source tree, `demo/run`, which the package installs.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::cli::DemoArgs;

/// The demo's script below the directory of shared files. It expects the builder of its guest beside itself.
const SCRIPT: &str = "headwater/demo/run";

/// Replaces this process by the demo. Returns only if that fails.
pub fn run(args: &DemoArgs) -> anyhow::Result<()> {
    let own = std::env::current_exe().context("cannot find this program's own file")?;
    let script = script_of(&own)?;
    let dir = match &args.dir {
        Some(dir) => std::path::absolute(dir).with_context(|| format!("cannot use {}", dir.display()))?,
        None => default_dir()?,
    };
    let mut demo = Command::new(&script);
    demo.env("HEADWATER", &own)
        .env("HEADWATER_DEMO_DIR", &dir)
        .env("HEADWATER_GUEST_DIR", dir.join("guest"))
        .env("DEMO_MACHINES", args.machines.to_string());
    // The demo starts its own daemon.
    demo.env_remove("HEADWATER_DATA_DIR").env_remove("HEADWATER_CONTEXT");
    Err(demo.exec()).with_context(|| format!("cannot run {}", script.display()))
}

/// The demo that was installed together with a program: /usr/bin/PROGRAM and /usr/share.
fn script_of(program: &Path) -> anyhow::Result<PathBuf> {
    let prefix = program.parent().and_then(Path::parent);
    let script = prefix.map(|prefix| prefix.join("share").join(SCRIPT));
    match script.filter(|script| script.is_file()) {
        Some(script) => Ok(script),
        None => bail!(
            "the demo is not installed with {}: the Debian package installs it as /usr/share/{SCRIPT}; in a source tree use 'make demo'",
            program.display()
        ),
    }
}

fn default_dir() -> anyhow::Result<PathBuf> {
    const NAME: &str = "headwater-demo";
    if rustix::process::geteuid().is_root() {
        return Ok(Path::new("/var/tmp").join(NAME));
    }
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    cache
        .map(|cache| cache.join(NAME))
        .context("neither XDG_CACHE_HOME nor HOME is set: name a directory with --dir")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_is_found_beside_the_program_and_its_absence_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("bin/headwater");
        let error = script_of(&program).unwrap_err().to_string();
        assert!(error.contains("/usr/share/headwater/demo/run") && error.contains("make demo"), "{error}");
        let script = dir.path().join("share/headwater/demo/run");
        std::fs::create_dir_all(script.parent().unwrap()).unwrap();
        std::fs::write(&script, "").unwrap();
        assert_eq!(script_of(&program).unwrap(), script);
    }
}
