//! Reads the loaders from installed packages into memory, and inspects them. Headwater ships no loader.
//!
//! | machines with | load |
//! |---|---|
//! | BIOS | iPXE (`undionly.kpxe`) |
//! | UEFI | Debian's signed shim and GRUB, with Secure Boot or without; or iPXE, which has no signature |
//!
//! The loader for UEFI has the name [`EFI_NAME`] in both cases, so that the site's DHCP server need not know which
//! loader it is.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::efi::Efi;
use crate::error::BootError;

/// The name of iPXE for BIOS on the TFTP server.
pub const BIOS_NAME: &str = "undionly.kpxe";
/// The name of the loader for UEFI on the TFTP server.
pub const EFI_NAME: &str = "headwater.efi";
/// The file that shim loads, from the server that shim itself came from.
const GRUB_NAME: &str = "grubx64.efi";
/// The paths at which GRUB looks for its configuration.
const GRUB_START: [&str; 2] = ["grub/x86_64-efi/grub.cfg", "grub/grub.cfg"];

/// Paths in Debian 12, then 13.
const BIOS_PATHS: &[&str] = &["/usr/lib/ipxe/undionly.kpxe"];
const EFI_PATHS: &[&str] = &["/usr/lib/ipxe/ipxe.efi", "/usr/lib/ipxe/ipxe-amd64.efi"];
const SHIM_DIR: &str = "/usr/lib/shim";
const GRUB_DIR: &str = "/usr/lib/grub/x86_64-efi-signed";
const SHIM_FILE: &str = "shimx64.efi.signed";
const GRUB_FILE: &str = "grubnetx64.efi.signed";

/// The lowest SBAT generation of GRUB that shim 16.1 accepts.
const GRUB_GENERATION_MIN: u32 = 5;

/// The loader for UEFI machines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Uefi {
    /// shim and GRUB if they are installed and can be served, else iPXE.
    #[default]
    Auto,
    /// shim and GRUB.
    Shim,
    /// iPXE.
    Ipxe,
}

/// The loaders, by the file names in answers.
#[derive(Clone, Debug)]
pub struct Loaders {
    bios: Arc<[u8]>,
    efi: Arc<[u8]>,
    grub: Option<Grub>,
}

/// GRUB, which shim starts.
#[derive(Clone, Debug)]
struct Grub {
    file: Arc<[u8]>,
    /// Its first configuration.
    start: Arc<[u8]>,
}

/// The files of shim and GRUB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedFiles {
    /// shim.
    pub shim: PathBuf,
    /// GRUB's network image.
    pub grub: PathBuf,
}

impl SignedFiles {
    /// The files in a directory, or those of Debian's packages.
    pub fn find(dir: Option<&Path>) -> Self {
        Self {
            shim: dir.unwrap_or(Path::new(SHIM_DIR)).join(SHIM_FILE),
            grub: dir.unwrap_or(Path::new(GRUB_DIR)).join(GRUB_FILE),
        }
    }
}

impl Loaders {
    /// Loaders from Debian's packages `ipxe`, `shim-signed` and `grub-efi-amd64-signed`. `signed`: a directory with
    /// shim and GRUB instead of the packages' files.
    pub fn installed(uefi: Uefi, signed: Option<&Path>) -> Result<Self, BootError> {
        let bios = first("iPXE for BIOS", BIOS_PATHS)?;
        let signed_files = || Self::signed(&bios, &SignedFiles::find(signed));
        let ipxe = || Self::read(&bios, &first("iPXE for UEFI", EFI_PATHS)?);
        match uefi {
            Uefi::Shim => signed_files(),
            Uefi::Auto if signed.is_some() => signed_files(),
            Uefi::Ipxe => ipxe(),
            Uefi::Auto => signed_files().or_else(|why| {
                let source = std::error::Error::source(&why).map(ToString::to_string);
                tracing::info!(source, "UEFI machines load iPXE, which Secure Boot refuses: {why}");
                ipxe()
            }),
        }
    }

    /// Two iPXE files: one for BIOS, one for UEFI.
    pub fn read(bios: &Path, efi: &Path) -> Result<Self, BootError> {
        Ok(Self { bios: file(bios)?, efi: file(efi)?, grub: None })
    }

    /// iPXE for BIOS; shim and GRUB for UEFI.
    pub fn signed(bios: &Path, files: &SignedFiles) -> Result<Self, BootError> {
        let SignedFiles { shim, grub } = files;
        let (shim_file, grub_file) = (file(shim)?, file(grub)?);
        inspect(shim, "shim", &shim_file)?;
        let efi = inspect(grub, "grub", &grub_file)?;
        if !efi.has_http {
            return Err(BootError::OldGrub { path: grub.clone() });
        }
        let generation =
            efi.sbat.iter().find(|(name, ..)| name == "grub").map(|(_, generation, _)| *generation);
        if generation.is_none_or(|generation| generation < GRUB_GENERATION_MIN) {
            tracing::warn!(
                path = %grub.display(), generation,
                "machines with a current shim refuse this GRUB, because its SBAT generation is below {GRUB_GENERATION_MIN}: install a newer GRUB"
            );
        }
        let start = Arc::default();
        Ok(Self { bios: file(bios)?, efi: shim_file, grub: Some(Grub { file: grub_file, start }) })
    }

    /// Sets GRUB's first configuration.
    #[must_use]
    pub fn with_start(mut self, text: &str) -> Self {
        if let Some(grub) = &mut self.grub {
            grub.start = Arc::from(text.as_bytes());
        }
        self
    }

    /// The loader with this file name. Some firmware puts a `/` in front of the name.
    pub fn find(&self, name: &str) -> Option<Arc<[u8]>> {
        let name = name.trim_start_matches('/');
        match (name, &self.grub) {
            (BIOS_NAME, _) => Some(Arc::clone(&self.bios)),
            (EFI_NAME, _) => Some(Arc::clone(&self.efi)),
            (GRUB_NAME, Some(grub)) => Some(Arc::clone(&grub.file)),
            (_, Some(grub)) if GRUB_START.contains(&name) => Some(Arc::clone(&grub.start)),
            _ => None,
        }
    }
}

fn inspect(path: &Path, component: &str, bytes: &[u8]) -> Result<Efi, BootError> {
    let efi = Efi::inspect(bytes).map_err(|source| BootError::Efi { path: path.to_owned(), source })?;
    tracing::info!(
        path = %path.display(), version = efi.version(component), sbat = efi.levels(), names = efi.names.join(", "),
        "UEFI machines load this file"
    );
    Ok(efi)
}

fn file(path: &Path) -> Result<Arc<[u8]>, BootError> {
    let bytes = std::fs::read(path);
    bytes.map(Arc::from).map_err(|source| BootError::ReadLoader { path: path.to_owned(), source })
}

fn first(what: &'static str, paths: &[&str]) -> Result<PathBuf, BootError> {
    let found = paths.iter().map(PathBuf::from).find(|path| path.is_file());
    found.ok_or_else(|| BootError::Loader { what, paths: paths.join(", ") })
}
