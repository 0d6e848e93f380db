//! `headwater boot media`: writes an image for a USB stick that boots machines without changes to DHCP.
//!
//! ```text
//!   FAT, without partitions
//!     syslinux (BIOS)     -> ipxe.krn, boot.ipx                         -> server
//!     EFI/BOOT/BOOTX64.EFI (shim) -> grubx64.efi -> grub/grub.cfg       -> server
//! ```

use std::ffi::OsStr;
use std::net::SocketAddrV4;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::Context;
use headwater_boot_server::loaders::{Loaders, SignedFiles};
use headwater_boot_server::medium;
use serde_json::json;

use crate::cli::BootMediaArgs;
use crate::failure::invalid;
use crate::show;

/// The file of iPXE as a Linux kernel, from the package `ipxe`.
const IPXE: &str = "/usr/lib/ipxe/ipxe.lkrn";
/// The image's geometry for `mformat`: 32,768 sectors of 512 bytes, 16 MiB.
const GEOMETRY: [&str; 6] = ["-T", "32768", "-h", "64", "-s", "32"];

/// Writes the image.
pub fn run(args: &BootMediaArgs, json: bool) -> anyhow::Result<()> {
    let out = &args.out;
    let failed = || format!("cannot make the medium {}", out.display());
    if out.symlink_metadata().is_ok() {
        return Err(invalid(format!("{}: the file exists; give another name or remove it", failed())));
    }
    for server in &args.server {
        super::boot::check_server(*server)?;
    }
    let servers: Vec<SocketAddrV4> =
        args.server.iter().map(|server| SocketAddrV4::new(*server, args.http)).collect();
    let signed = SignedFiles::find(args.signed.as_deref());
    Loaders::signed(Path::new(IPXE), &signed).with_context(failed)?;
    let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let work = dir.join(format!(".headwater-media-{}", std::process::id()));
    std::fs::create_dir(&work).with_context(|| format!("cannot make {}", work.display()))?;
    let made = fill(&work, &signed, &servers).and_then(|()| Ok(std::fs::rename(work.join("image"), out)?));
    let removed = std::fs::remove_dir_all(&work);
    made.with_context(failed)?;
    removed.with_context(|| format!("cannot remove {}", work.display()))?;
    show::if_read(match json {
        true => show::json(&json!({ "file": out, "servers": servers })),
        false => show::line(&format!(
            "{}: for a USB stick (dd if={} of=/dev/STICK bs=1M conv=fsync); BIOS, UEFI and Secure Boot",
            out.display(),
            out.display()
        )),
    })
}

fn fill(work: &Path, signed: &SignedFiles, servers: &[SocketAddrV4]) -> anyhow::Result<()> {
    let image = work.join("image");
    let image = image.as_os_str();
    let text = |name: &str, text: String| {
        let path = work.join(name);
        std::fs::write(&path, text).map(|()| path)
    };
    let grub = text("grub.cfg", medium::grub(servers))?;
    let script = text("boot.ipx", medium::ipxe(servers))?;
    let syslinux = text("syslinux.cfg", medium::syslinux("ipxe.krn", "boot.ipx"))?;
    let words = |words: &[&'static str]| words.iter().map(|word| OsStr::new(*word)).collect::<Vec<_>>();
    let mut format = words(&["-C"]);
    format.extend(words(&GEOMETRY));
    format.extend([OsStr::new("-i"), image, OsStr::new("::")]);
    tool("mformat", "mtools", &format)?;
    let mut directories = vec![OsStr::new("-i"), image];
    directories.extend(words(&["::EFI", "::EFI/BOOT", "::grub"]));
    tool("mmd", "mtools", &directories)?;
    for (from, to) in [
        (signed.shim.as_path(), "::EFI/BOOT/BOOTX64.EFI"),
        (signed.grub.as_path(), "::EFI/BOOT/grubx64.efi"),
        (grub.as_path(), "::grub/grub.cfg"),
        (Path::new(IPXE), "::ipxe.krn"),
        (script.as_path(), "::boot.ipx"),
        (syslinux.as_path(), "::syslinux.cfg"),
    ] {
        tool("mcopy", "mtools", &[OsStr::new("-i"), image, from.as_os_str(), OsStr::new(to)])?;
    }
    tool("syslinux", "syslinux", &[OsStr::new("--install"), image])
}

fn tool(program: &str, package: &str, arguments: &[&OsStr]) -> anyhow::Result<()> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot run {program}, of the Debian package {package}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::bail!("{program} failed: {}", said.trim())
}
