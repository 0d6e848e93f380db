//! Writes the boot files of one machine: its script for iPXE or GRUB, and a cpio archive with its settings, which the
//! kernel unpacks into the initramfs.
//!
//! ```text
//!   Boot --script()--> #!ipxe .. kernel, initrd, settings, boot
//!        --grub::configuration()--> linux, initrd, boot
//!   Settings, token, certificate --cpio::archive()--> /headwater/settings.json, /headwater/token, /headwater/ca.pem
//! ```
//!
//! # Guarantees
//! - No value can end its line, word or quotation in a script: a value with other than plain characters is refused.
//!   In text for people, such characters are replaced.
//! - Pure: no files, no sockets, no clock.
//!
//! # Limits
//! [`script::OPTIONS_BYTES_MAX`] for the kernel command line.
//!
//! # Errors
//! [`ScriptError`] names the refused value and the refused character.
//!
//! # Not here
//! Menus, UKIs.
//!
//! Start reading at [`script`](mod@script).

#![cfg_attr(
    not(test),
    warn(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        clippy::todo,
        clippy::unimplemented,
        clippy::indexing_slicing,
        clippy::string_slice,
        clippy::get_unwrap,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss
    )
)]

pub mod cpio;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod grub;
pub mod medium;
pub mod script;
pub mod settings;

pub use script::{Boot, ScriptError, check_options, refusal, script};
pub use settings::{CA_FILE, DIRECTORY, SETTINGS_FILE, Settings, TOKEN_FILE};
