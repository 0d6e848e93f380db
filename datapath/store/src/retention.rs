//! Retention roots: records in a bucket of who needs a version, even while no process has the store open. A store
//! in a directory has none, because only one process writes to it.
//!
//! A pin ends with its process. A persistent disk outlives the runs of its machine, and cannot be read
//! without the version below it. So its daemon records the need in the store. Other daemons of the same store
//! check these records before they remove a version.
//!
//! ```text
//!   holds/MANIFEST/IMAGE/PURPOSE.DAEMON.ID    a line of text: the holder, for people
//! ```
//! A machine that follows a channel needs some version of the image, but no particular one. MANIFEST is then
//! 64 zeros, and the image keeps at least one version.
//!
//! A retention root never expires; the daemon that sets it also removes it. It is set before the need is
//! recorded elsewhere, and removed after that other record. So a crash can leave an unneeded root, but never
//! a missing one.

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::name::ImageName;

/// The longest text for people, in bytes.
pub(crate) const HOLDER_MAX_BYTES: usize = 512;
/// The longest [`RetentionRoot::id`], in bytes.
const ID_MAX_BYTES: usize = 128;

/// The manifest of a root that keeps an image, whichever versions it has.
pub const ANY_VERSION: Hash = Hash([0; 32]);

/// Why a version is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RetentionPurpose {
    /// A persistent disk has it as its base.
    Disk,
    /// A maintenance session of the image. Of all daemons together, only one may have a session of an image.
    MaintenanceSession,
    /// Machines boot it by its number.
    Pin,
    /// Machines boot the versions that the channels of the image select. Used with [`ANY_VERSION`].
    Follow,
}

impl RetentionPurpose {
    const ALL: [Self; 4] = [Self::Disk, Self::MaintenanceSession, Self::Pin, Self::Follow];

    const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::MaintenanceSession => "edit",
            Self::Pin => "pin",
            Self::Follow => "follow",
        }
    }

    const fn in_words(self) -> &'static str {
        match self {
            Self::Disk => "has a persistent disk over it",
            Self::MaintenanceSession => "edits it",
            Self::Pin => "boots it by its number",
            Self::Follow => "follows its channels",
        }
    }
}

/// One need for a version. Two roots that differ only in [`RetentionRoot::holder`] have the same key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetentionRoot {
    /// The image. The version must be in this image, because its data under another name is of no use.
    pub image: ImageName,
    /// The version's manifest, or [`ANY_VERSION`].
    pub manifest: Hash,
    /// Why it is needed.
    pub purpose: RetentionPurpose,
    /// The daemon: letters, digits and `-`. Each daemon has a different one.
    pub daemon: String,
    /// The name of the need in that daemon: letters, digits, `-`, `_` and `.`.
    pub id: String,
    /// The holder, for people: `machine 'lab' of host pxe-1`.
    pub holder: String,
}

impl RetentionRoot {
    /// The path of its file below the folder of all roots.
    pub(crate) fn path(&self) -> Result<String, StoreError> {
        let sound = |text: &str, others: &[char]| {
            !text.is_empty()
                && text.len() <= ID_MAX_BYTES
                && text.chars().all(|c| c.is_ascii_alphanumeric() || others.contains(&c))
        };
        let Self { image, manifest, purpose, daemon, id, .. } = self;
        if sound(daemon, &['-']) && sound(id, &['-', '_', '.']) {
            return Ok(format!("{manifest}/{image}/{}.{daemon}.{id}", purpose.name()));
        }
        let message = format!(
            "cannot record who needs a version of '{image}': '{daemon}' or '{id}' is not a valid name"
        );
        Err(StoreError::new(StoreErrorKind::Invalid, message))
    }

    /// Parses a path of [`RetentionRoot::path`]. The holder is not part of the path.
    pub(crate) fn parse(path: &str) -> Option<Self> {
        let (manifest, rest) = path.split_once('/')?;
        let (image, name) = rest.split_once('/')?;
        let mut parts = name.splitn(3, '.');
        let (purpose, daemon, id) = (parts.next()?, parts.next()?, parts.next()?);
        let purpose = RetentionPurpose::ALL.into_iter().find(|known| known.name() == purpose)?;
        let root = Self {
            image: image.parse().ok()?,
            manifest: manifest.parse().ok()?,
            purpose,
            daemon: daemon.to_owned(),
            id: id.to_owned(),
            holder: String::new(),
        };
        (root.path().ok()? == path).then_some(root)
    }

    /// The content of its file.
    pub(crate) fn text(&self) -> String {
        let mut text: String = self.holder.chars().filter(|c| !c.is_control()).collect();
        text.truncate(text.floor_char_boundary(HOLDER_MAX_BYTES));
        text.push('\n');
        text
    }

    /// Whether the two roots exclude each other. Each daemon tracks its own maintenance sessions.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        let both_edit = self.purpose == RetentionPurpose::MaintenanceSession
            && other.purpose == RetentionPurpose::MaintenanceSession;
        both_edit && self.image == other.image && self.daemon != other.daemon
    }
}

/// The manifest in a path below the folder of all roots, whatever follows it.
pub(crate) fn manifest_of(path: &str) -> Option<Hash> {
    path.split_once('/')?.0.parse().ok()
}

/// Whether a path is a root of this version of the image. Purposes of later releases count, too.
pub(crate) fn is_of(path: &str, manifest: Hash, image: &ImageName) -> bool {
    path.starts_with(&format!("{manifest}/{image}/"))
}

/// The error if `what`, a version or an image, cannot be removed. `text` is the content of the file at
/// `path`, and `shown` its full name.
pub(crate) fn in_use(what: &str, path: &str, text: &[u8], shown: &str) -> StoreError {
    let text: String = String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).collect();
    let holder = if text.is_empty() { "somebody" } else { &text };
    let does = RetentionRoot::parse(path).map_or("needs it", |root| root.purpose.in_words());
    StoreError::new(
        StoreErrorKind::InUse,
        format!("cannot remove {what}: {holder} {does} (if its daemon is gone for ever, remove {shown})"),
    )
}

/// The error for a second maintenance session of an image.
pub(crate) fn edited(root: &RetentionRoot, text: &[u8], shown: &str) -> StoreError {
    let text: String = String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).collect();
    let (image, holder) = (&root.image, if text.is_empty() { "another daemon" } else { &text });
    StoreError::new(
        StoreErrorKind::InUse,
        format!("{holder} edits image '{image}' already (if its daemon is gone for ever, remove {shown})"),
    )
}

/// The error if the version does not exist any more.
pub(crate) fn gone(root: &RetentionRoot) -> StoreError {
    let (image, manifest) = (&root.image, root.manifest.short());
    let what = match root.manifest {
        ANY_VERSION => format!("image '{image}'"),
        _ => format!("version {manifest} of '{image}'"),
    };
    StoreError::new(StoreErrorKind::NotFound, format!("{what} was removed meanwhile"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> RetentionRoot {
        RetentionRoot {
            image: "deb.12".parse().unwrap(),
            manifest: Hash([7; 32]),
            purpose: RetentionPurpose::MaintenanceSession,
            daemon: "0f-1".to_owned(),
            id: "machine.lab_1".to_owned(),
            holder: "machine 'lab'\nof host a".to_owned(),
        }
    }

    #[test]
    fn a_path_contains_everything_except_the_holder() {
        let path = root().path().unwrap();
        assert_eq!(path, format!("{}/deb.12/edit.0f-1.machine.lab_1", "07".repeat(32)));
        assert_eq!(RetentionRoot::parse(&path), Some(RetentionRoot { holder: String::new(), ..root() }));
        assert!(is_of(&path, Hash([7; 32]), &"deb.12".parse().unwrap()));
        assert!(!is_of(&path, Hash([7; 32]), &"deb".parse().unwrap()));
        assert_eq!(
            (root().text(), manifest_of(&path)),
            ("machine 'lab'of host a\n".to_owned(), Some(Hash([7; 32])))
        );
    }

    #[test]
    fn names_that_would_lead_elsewhere_are_refused() {
        for id in ["", "a/b", "..\0", &"x".repeat(129)] {
            let odd = RetentionRoot { id: id.to_owned(), ..root() };
            assert_eq!(odd.path().unwrap_err().kind(), StoreErrorKind::Invalid);
        }
        assert!(RetentionRoot { daemon: "a.b".to_owned(), ..root() }.path().is_err());
        for odd in ["x", "x/deb/edit.a.b", &format!("{}/deb/lend.a.b", "07".repeat(32))] {
            assert_eq!(RetentionRoot::parse(odd), None, "{odd}");
        }
    }
}
