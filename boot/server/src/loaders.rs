//! The loaders: iPXE of an installed package, read into memory. None is shipped.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::BootError;

/// The name of iPXE for BIOS on the TFTP server.
pub const BIOS_NAME: &str = "undionly.kpxe";
/// The name of iPXE for UEFI there.
pub const EFI_NAME: &str = "ipxe.efi";

/// Where Debian has them: 12, then 13.
const BIOS_PATHS: &[&str] = &["/usr/lib/ipxe/undionly.kpxe"];
const EFI_PATHS: &[&str] = &["/usr/lib/ipxe/ipxe.efi", "/usr/lib/ipxe/ipxe-amd64.efi"];

/// The loaders, by the names that answers give.
#[derive(Clone, Debug)]
pub struct Loaders {
    bios: Arc<[u8]>,
    efi: Arc<[u8]>,
}

impl Loaders {
    /// Those of Debian's package `ipxe`.
    pub fn installed() -> Result<Self, BootError> {
        let bios = first("iPXE for BIOS", BIOS_PATHS)?;
        let efi = first("iPXE for UEFI", EFI_PATHS)?;
        Self::read(&bios, &efi)
    }

    /// Those of two files.
    pub fn read(bios: &Path, efi: &Path) -> Result<Self, BootError> {
        let read = |path: &Path| {
            let bytes = std::fs::read(path);
            bytes.map(Arc::from).map_err(|source| BootError::ReadLoader { path: path.to_owned(), source })
        };
        Ok(Self { bios: read(bios)?, efi: read(efi)? })
    }

    /// The file of a name; some firmware writes a `/` before it.
    pub fn find(&self, name: &str) -> Option<Arc<[u8]>> {
        match name.trim_start_matches('/') {
            BIOS_NAME => Some(Arc::clone(&self.bios)),
            EFI_NAME => Some(Arc::clone(&self.efi)),
            _ => None,
        }
    }
}

fn first(what: &'static str, paths: &[&str]) -> Result<PathBuf, BootError> {
    let found = paths.iter().map(PathBuf::from).find(|path| path.is_file());
    found.ok_or_else(|| BootError::Loader { what, paths: paths.join(", ") })
}
