//! Finds QEMU on this host.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The emulator that runs the machines.
const QEMU: &str = "qemu-system-x86_64";

/// The packages that have it, by distribution.
const QEMU_PACKAGES: &str =
    "Debian and Ubuntu: 'apt-get install qemu-system-x86', Fedora: 'dnf install qemu-system-x86-core'";

/// Path of the emulator, looked up in `PATH`, or the error that says what to install.
pub fn find() -> Result<PathBuf> {
    find_in(QEMU, QEMU_PACKAGES, &std::env::var_os("PATH").unwrap_or_default())
}

pub(crate) fn find_in(binary: &str, packages: &'static str, path: &OsStr) -> Result<PathBuf> {
    std::env::split_paths(path)
        .map(|dir| dir.join(binary))
        .find(|file| is_executable(file))
        .ok_or_else(|| Error::NotInstalled { what: format!("'{binary}'"), packages })
}

fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_emulator_is_an_error_that_names_the_package() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(QEMU), "not executable").unwrap();
        let error = find_in(QEMU, QEMU_PACKAGES, dir.path().as_os_str()).unwrap_err().to_string();
        assert!(error.contains("apt-get install qemu-system-x86"), "{error}");
    }
}
