//! Why the boot server cannot serve.

use std::path::PathBuf;

/// What failed, on what, and why.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// A socket cannot be had.
    #[error("cannot listen for {what} on {interface}")]
    Listen {
        /// Which protocol and port.
        what: String,
        /// The interface.
        interface: String,
        /// Why.
        source: std::io::Error,
    },
    /// The interface has no address, or is not there.
    #[error("cannot serve boots on {interface}, which has no IPv4 address or is not there")]
    Interface {
        /// Its name.
        interface: String,
        /// Why.
        source: std::io::Error,
    },
    /// A loader is missing.
    #[error("cannot serve boots: there is no {what} ({paths}); install the Debian package ipxe")]
    Loader {
        /// What for.
        what: &'static str,
        /// The paths that were tried.
        paths: String,
    },
    /// A loader cannot be read.
    #[error("cannot read the loader {}", .path.display())]
    ReadLoader {
        /// Its file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A loader cannot be used.
    #[error("cannot serve the loader {}", .path.display())]
    Efi {
        /// Its file.
        path: PathBuf,
        /// Why.
        source: crate::efi::EfiError,
    },
    /// GRUB without HTTP.
    #[error(
        "cannot serve {}: this GRUB has no HTTP; Debian 13 has one in the package grub-efi-amd64-signed, whose files --boot-signed takes from a directory",
        .path.display()
    )]
    OldGrub {
        /// Its file.
        path: PathBuf,
    },
    /// The file of leases cannot be read or written.
    #[error("cannot give addresses: the leases in {} cannot be read and written", .path.display())]
    Leases {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file of leases is damaged.
    #[error(
        "cannot give addresses: line {line} of {} is no lease; correct or remove that line, or remove the file",
        .path.display()
    )]
    DamagedLeases {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
}
