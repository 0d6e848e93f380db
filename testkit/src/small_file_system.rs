//! A file system of a few MiB that a test can fill.

use std::path::Path;
use std::process::{Command, Stdio};

/// The file system's directory, for the child.
const CHILD_DIR: &str = "HEADWATER_SMALL_FILE_SYSTEM";
/// The last output of the child. If the child ran another test or none, this line is missing.
const DONE: &str = "all was done there";

/// Runs `work` in a file system of `size_mib` MiB that is mounted on `dir`, an empty directory. It runs in a
/// child process that runs `test`, which is the calling test, in a mount namespace of its own. Nobody else
/// sees the mount, and it ends with the process.
///
/// # Panics
/// If the child fails, or `test` is not the caller's name.
pub fn on_small_file_system(test: &str, dir: &Path, size_mib: u64, work: impl FnOnce(&Path)) {
    if let Some(mounted) = std::env::var_os(CHILD_DIR) {
        work(Path::new(&mounted));
        println!("{DONE}");
        return;
    }
    let script = format!(
        "mount -t tmpfs -o size={size_mib}m tmpfs \"${CHILD_DIR}\" && exec \"$0\" --exact {test} --nocapture"
    );
    let mut command = Command::new("unshare");
    command.args(["--user", "--map-root-user", "--mount", "sh", "-c", &script]);
    command.arg(std::env::current_exe().unwrap()).env(CHILD_DIR, dir);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.matches(DONE).count() == 1, "{said}{complained}");
}
