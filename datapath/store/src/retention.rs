//! Holds: notes in a store of who needs a version also while nobody has the store open.
//!
//! A pin ends with its process. A disk that is kept outlives the runs of its machine, and cannot be read without the version below
//! it; so its daemon notes in the store that there is one, and other daemons of the same store heed that before they remove a
//! version.
//!
//! ```text
//!   holds/MANIFEST/IMAGE/PURPOSE.DAEMON.ID    a line of text: the holder, for people
//! ```
//! Machines that boot what a channel says need some version of the image and none in particular: MANIFEST is zero then, and the image
//! keeps one version at least.
//!
//! A hold does not lapse. Whoever sets it takes it away: it is there before what it is for is noted elsewhere, and goes after
//! that, so that a crash leaves one too many and never one too few.

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::name::ImageName;

/// The longest text for people, in bytes.
pub(crate) const HOLDER_MAX_BYTES: usize = 512;
/// The longest [`RetentionRoot::id`], in bytes.
const ID_MAX_BYTES: usize = 128;

/// The manifest of a hold that is of an image, whichever versions it has.
pub const ANY_VERSION: Hash = Hash([0; 32]);

/// What a version is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RetentionPurpose {
    /// A disk over it is kept.
    Disk,
    /// It is edited: one holder in all daemons may do that to an image.
    MaintenanceSession,
    /// Machines are to boot it, by its number.
    Pin,
    /// Machines are to boot what the channels of the image say: it is of [`ANY_VERSION`].
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
            Self::Pin => "is to boot it",
            Self::Follow => "boots what its channels say",
        }
    }
}

/// Somebody's need of a version. Two with the same fields but [`RetentionRoot::holder`] are one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetentionRoot {
    /// The image, which must have the version, too: data under another name is of no use.
    pub image: ImageName,
    /// The version's manifest, or [`ANY_VERSION`].
    pub manifest: Hash,
    /// What for.
    pub purpose: RetentionPurpose,
    /// Which daemon: letters, digits and `-`; no two have the same.
    pub daemon: String,
    /// What of that daemon: letters, digits, `-`, `_` and `.`.
    pub id: String,
    /// The holder, for people: `machine 'lab' of host pxe-1`.
    pub holder: String,
}

impl RetentionRoot {
    /// Where it is noted, below the folder of all.
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
        let message = format!("cannot note who needs a version of '{image}': '{daemon}', '{id}' is no name");
        Err(StoreError::new(StoreErrorKind::Invalid, message))
    }

    /// Reads what [`RetentionRoot::path`] gave. The holder is not in it.
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

    /// What is written there.
    pub(crate) fn text(&self) -> String {
        let mut text: String = self.holder.chars().filter(|c| !c.is_control()).collect();
        text.truncate(text.floor_char_boundary(HOLDER_MAX_BYTES));
        text.push('\n');
        text
    }

    /// Whether both cannot be: each daemon knows its own edits.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        let both_edit = self.purpose == RetentionPurpose::MaintenanceSession
            && other.purpose == RetentionPurpose::MaintenanceSession;
        both_edit && self.image == other.image && self.daemon != other.daemon
    }
}

/// The manifest that a path below the folder of all holds is of, whatever comes after that.
pub(crate) fn manifest_of(path: &str) -> Option<Hash> {
    path.split_once('/')?.0.parse().ok()
}

/// Holds of this version of the image, also those of a later release.
pub(crate) fn is_of(path: &str, manifest: Hash, image: &ImageName) -> bool {
    path.starts_with(&format!("{manifest}/{image}/"))
}

/// Why `what`, a version or an image, stays: `text` is what is written at `path`, and `shown` where that is.
pub(crate) fn in_use(what: &str, path: &str, text: &[u8], shown: &str) -> StoreError {
    let text: String = String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).collect();
    let holder = if text.is_empty() { "somebody" } else { &text };
    let does = RetentionRoot::parse(path).map_or("needs it", |root| root.purpose.in_words());
    StoreError::new(
        StoreErrorKind::InUse,
        format!("cannot remove {what}: {holder} {does} (if its daemon is gone for ever, remove {shown})"),
    )
}

/// Why an image is not edited by a second one.
pub(crate) fn edited(root: &RetentionRoot, text: &[u8], shown: &str) -> StoreError {
    let text: String = String::from_utf8_lossy(text).chars().filter(|c| !c.is_control()).collect();
    let (image, holder) = (&root.image, if text.is_empty() { "another daemon" } else { &text });
    StoreError::new(
        StoreErrorKind::InUse,
        format!("{holder} edits image '{image}' already (if its daemon is gone for ever, remove {shown})"),
    )
}

/// The version that was to be held is gone.
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
    fn a_path_says_all_but_who_the_holder_is() {
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
