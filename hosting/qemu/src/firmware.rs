//! The files of a UEFI firmware: its code, which all machines share, and the variables of each machine.
//!
//! With Secure Boot, the code is the build that protects its variables by system management mode (SMM), and the
//! template of the variables holds Microsoft's keys: the firmware runs only loaders that are signed with these.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::spec::RunFiles;

/// Paths of code and of the template of the variables, without Secure Boot, in the packages of distributions.
const PLACES: [(&str, &str); 4] = [
    // Debian, Ubuntu.
    ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd"),
    // Fedora, RHEL.
    ("/usr/share/edk2/ovmf/OVMF_CODE.fd", "/usr/share/edk2/ovmf/OVMF_VARS.fd"),
    // Arch.
    ("/usr/share/edk2/x64/OVMF_CODE.4m.fd", "/usr/share/edk2/x64/OVMF_VARS.4m.fd"),
    // openSUSE.
    ("/usr/share/qemu/ovmf-x86_64-code.bin", "/usr/share/qemu/ovmf-x86_64-vars.bin"),
];

/// The same paths for Secure Boot with Microsoft's keys.
const SECURE_PLACES: [(&str, &str); 3] = [
    // Debian, Ubuntu.
    ("/usr/share/OVMF/OVMF_CODE_4M.ms.fd", "/usr/share/OVMF/OVMF_VARS_4M.ms.fd"),
    // Fedora, RHEL.
    ("/usr/share/edk2/ovmf/OVMF_CODE.secboot.fd", "/usr/share/edk2/ovmf/OVMF_VARS.secboot.fd"),
    // openSUSE.
    ("/usr/share/qemu/ovmf-x86_64-smm-ms-code.bin", "/usr/share/qemu/ovmf-x86_64-smm-ms-vars.bin"),
];

/// The packages with these files, by distribution.
const PACKAGES: &str = "Debian and Ubuntu: 'apt-get install ovmf', Fedora and Arch: package edk2-ovmf, openSUSE: \
                        package qemu-ovmf-x86_64";
/// The same for Secure Boot: Arch's package has no template with Microsoft's keys.
const SECURE_PACKAGES: &str = "Debian and Ubuntu: 'apt-get install ovmf', Fedora: package edk2-ovmf, openSUSE: \
                               package qemu-ovmf-x86_64";

/// The largest accepted file of variables; those of the builds above have half a MiB.
const MAX_VARIABLES_BYTES: u64 = 16 << 20;

/// The firmware of one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UefiFiles {
    /// The code, which is only read.
    pub code: PathBuf,
    /// The machine's variables; as `find` returns it, the template that they are a copy of.
    pub variables: PathBuf,
    /// Whether it runs signed loaders only.
    pub secure_boot: bool,
}

/// Finds the firmware on this host: its code, and the template of the variables.
pub fn find(secure_boot: bool) -> Result<UefiFiles> {
    find_below(Path::new("/"), secure_boot)
}

fn find_below(root: &Path, secure_boot: bool) -> Result<UefiFiles> {
    let at = |path: &str| root.join(path.trim_start_matches('/'));
    let (places, packages, what) = if secure_boot {
        let what = "a UEFI firmware (OVMF) with Secure Boot and Microsoft's keys";
        (&SECURE_PLACES[..], SECURE_PACKAGES, what)
    } else {
        (&PLACES[..], PACKAGES, "a UEFI firmware (OVMF)")
    };
    places
        .iter()
        .map(|(code, variables)| UefiFiles { code: at(code), variables: at(variables), secure_boot })
        .find(|files| files.code.is_file() && files.variables.is_file())
        .ok_or_else(|| Error::NotInstalled { what: what.to_owned(), packages })
}

/// Prepares the firmware of a machine that is about to start. Its variables are a new copy of the template, or the file
/// `kept`, if that is given. If that file does not exist, it is made as a copy of the template.
pub fn prepare(files: &RunFiles, kept: Option<&Path>, secure_boot: bool) -> Result<UefiFiles> {
    std::fs::create_dir_all(&files.dir).map_err(Error::io("create the run directory", &files.dir))?;
    let UefiFiles { code, variables: template, .. } = find(secure_boot)?;
    let describe = |path: &Path| Error::io("read the template of the firmware variables", path);
    let size_bytes = std::fs::metadata(&template).map_err(describe(&template))?.len();
    if size_bytes > MAX_VARIABLES_BYTES {
        let why = format!("it has {size_bytes} bytes, at most {MAX_VARIABLES_BYTES} are expected");
        return Err(describe(&template)(std::io::Error::new(ErrorKind::InvalidData, why)));
    }
    let variables = kept.map_or_else(|| files.firmware_variables(), Path::to_path_buf);
    if let Some(kept) = kept {
        let use_kept = Error::io("use the machine's firmware variables", kept);
        match std::fs::metadata(kept) {
            Ok(found) if found.len() == size_bytes => return Ok(UefiFiles { code, variables, secure_boot }),
            Ok(found) => {
                let why = format!(
                    "it has {} bytes, but the firmware of this host needs {size_bytes}, so it belongs to another build; move the file \
                     away, and the next start makes new variables: the disk stays as it is",
                    found.len()
                );
                return Err(use_kept(std::io::Error::new(ErrorKind::InvalidData, why)));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(use_kept(error)),
        }
    }
    let bytes = std::fs::read(&template).map_err(describe(&template))?;
    write_whole(&variables, &bytes).map_err(Error::io("write the firmware variables", &variables))?;
    Ok(UefiFiles { code, variables, secure_boot })
}

/// Writes a file atomically: a crash leaves no partial file that the next start would use.
fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let new = path.with_extension("new");
    // An earlier start may have left the file with another mode.
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file: File = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_host_without_ovmf_gets_the_name_of_the_package() {
        let dir = tempfile::tempdir().unwrap();
        for (secure_boot, words) in
            [(false, "(OVMF) is not"), (true, "Secure Boot and Microsoft's keys is not")]
        {
            let error = find_below(dir.path(), secure_boot).unwrap_err().to_string();
            assert!(error.contains(words) && error.contains("apt-get install ovmf"), "{error}");
        }
        // Code without variables is not enough.
        let places = PLACES[1];
        let at = |path: &str| dir.path().join(path.trim_start_matches('/'));
        std::fs::create_dir_all(at(places.0).parent().unwrap()).unwrap();
        std::fs::write(at(places.0), "code").unwrap();
        assert!(find_below(dir.path(), false).is_err());
        std::fs::write(at(places.1), "variables").unwrap();
        let found = find_below(dir.path(), false).unwrap();
        let (code, variables) = (at(places.0), at(places.1));
        assert_eq!(found, UefiFiles { code, variables, secure_boot: false });
        // A firmware without Secure Boot is no substitute for one with it.
        assert!(find_below(dir.path(), true).is_err());
    }

    #[test]
    fn variables_are_new_at_each_start_unless_kept() {
        let dir = tempfile::tempdir().unwrap();
        let files = RunFiles::new(&dir.path().join("run"));
        let first = prepare(&files, None, false).expect("apt-get install ovmf");
        let empty = std::fs::read(&first.variables).unwrap();
        assert_eq!(std::fs::metadata(&first.variables).unwrap().mode() & 0o777, 0o600);
        let kept = dir.path().join("kept-vars");
        for path in [None, Some(kept.as_path())] {
            let variables = prepare(&files, path, false).unwrap().variables;
            assert_eq!(std::fs::read(&variables).unwrap(), empty);
            let mut changed = empty.clone();
            changed[100_000] = 7;
            std::fs::write(&variables, &changed).unwrap();
            let again = std::fs::read(prepare(&files, path, false).unwrap().variables).unwrap();
            assert_eq!(again == changed, path.is_some());
        }
        std::fs::write(&kept, "short").unwrap();
        let error = prepare(&files, Some(&kept), false).unwrap_err().to_string();
        assert!(error.contains("5 bytes") && error.contains("the disk stays as it is"), "{error}");
    }
}
