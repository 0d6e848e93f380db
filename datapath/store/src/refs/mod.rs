//! The versions of an image, its channels, and the encoding of the file that lists them.
//!
//! A channel is a name that points to one version of an image, such as `production`; machines can boot a channel instead of
//! a fixed version. The module does no I/O: each kind of store reads the file, changes an [`Image`] and writes it back;
//! `codec` converts between values and bytes. The layout is in `docs/format.md`.

mod channel;
mod codec;

use std::collections::HashSet;

use crate::error::{StoreError, StoreErrorKind};
use crate::hash::Hash;
use crate::name::{ImageName, Selector};
use crate::store::{Adopted, Committed, NewVersion};

pub use channel::{CHANNEL_PAST_MAX, Channel, Pointer};

/// The longest note and the longest source, in bytes of UTF-8.
pub const NOTE_MAX_BYTES: usize = 1024;
/// The longest author of a version or of a promotion, in bytes of UTF-8.
pub const AUTHOR_MAX_BYTES: usize = 256;
/// The most versions that an image can have.
pub const VERSIONS_MAX: usize = 65_536;
/// The most data objects that a version can refer to.
pub const VERSION_OBJECTS_MAX: usize = 65_536;

/// One version of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// 1, 2, 3 ...; a number is not used again while the image exists, even if all its versions were
    /// removed.
    pub number: u32,
    /// BLAKE3 of the manifest: the version's identity.
    pub manifest: Hash,
    /// When it was made, in seconds since 1970.
    pub created_at_s: u64,
    /// Size of the image, in bytes.
    pub size_bytes: u64,
    /// What this version added to the store, in bytes.
    pub stored_bytes: u64,
    /// Where it came from, such as a path or URI.
    pub source: String,
    /// A note for people.
    pub note: String,
    /// Who made it.
    pub author: String,
    /// Whether it is retired: nothing selects it by default, and no channel can point to it.
    pub retired: bool,
    /// Whether it may hold the identity of one machine, such as its private SSH host key; see
    /// [`NewVersion::keeps_identity`].
    pub keeps_identity: bool,
    /// The data objects it needs, its own and older ones.
    pub objects: Vec<Hash>,
}

/// An image: its versions, oldest first, and its channels. Even without versions, its name and next version
/// number stay until the image itself is removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// Its name.
    pub name: ImageName,
    /// In ascending order of their numbers.
    pub versions: Vec<Version>,
    /// Where each channel points and pointed, oldest first. The last pointer of a channel is its present one.
    pointers: Vec<Pointer>,
    /// Channels whose older pointers were dropped from `pointers`. Each of them still has one there.
    cut_short: HashSet<Channel>,
    /// Scheduled promotions, at most one for each channel.
    scheduled: Vec<Pointer>,
    pub(crate) next_number: u32,
}

pub(crate) fn no_such_image(name: &ImageName) -> StoreError {
    StoreError::new(
        StoreErrorKind::NotFound,
        format!("there is no image '{name}'; 'headwater image list' lists the images"),
    )
}

impl Image {
    /// An image that has no versions yet.
    pub fn empty(name: ImageName) -> Self {
        Self {
            name,
            versions: Vec::new(),
            pointers: Vec::new(),
            cut_short: HashSet::new(),
            scheduled: Vec::new(),
            next_number: 1,
        }
    }

    /// Gives a new version the next number.
    pub(crate) fn add(
        &mut self,
        new: &NewVersion<'_>,
        manifest: Hash,
        stored_bytes: u64,
    ) -> Result<Committed, StoreError> {
        if let (Some(most), Some(newest)) = (new.newest_at_most, self.newest())
            && newest.number > most
        {
            let (image, newest) = (&self.name, newest.number);
            let message =
                format!("{image}@{newest} was made in the meantime, and the new version is not based on it");
            return Err(StoreError::new(StoreErrorKind::InUse, message));
        }
        let version = Version {
            number: self.next_number,
            manifest,
            created_at_s: new.created_at_s,
            size_bytes: new.size_bytes,
            stored_bytes,
            source: new.source.to_owned(),
            note: new.note.to_owned(),
            author: new.author.to_owned(),
            retired: false,
            keeps_identity: new.keeps_identity,
            objects: new.objects.to_vec(),
        };
        self.next_number = self.after(version.number)?;
        let production = if new.is_sealed { self.keep_production(new) } else { None };
        self.versions.push(version.clone());
        Ok(Committed { version, is_new: true, production })
    }

    fn after(&self, number: u32) -> Result<u32, StoreError> {
        number.checked_add(1).ok_or_else(|| {
            let message = format!("image '{}' is out of version numbers", self.name);
            StoreError::new(StoreErrorKind::Invalid, message)
        })
    }

    /// Adds a version of another store under its number. Returns what that did; `None` if the version existed
    /// already.
    pub(crate) fn adopt(&mut self, version: &Version) -> Result<Option<Adopted>, StoreError> {
        match self.versions.binary_search_by_key(&version.number, |there| there.number) {
            Ok(at) if self.versions.get(at).is_some_and(|there| there.manifest == version.manifest) => {
                Ok(None)
            }
            Ok(_) => Err(StoreError::new(
                StoreErrorKind::InUse,
                format!(
                    "{}@{} exists in both stores with different contents; remove this version from one of the stores, or use \
                     another image name",
                    self.name, version.number
                ),
            )),
            Err(at) => {
                self.next_number = self.next_number.max(self.after(version.number)?);
                let booted = self.booted();
                self.versions.insert(at, version.clone());
                let is_newest = self.newest().is_some_and(|newest| newest.number == version.number);
                Ok(Some(Adopted { is_newest, booted, boots: self.booted() }))
            }
        }
    }

    /// Sets channels, scheduled promotions, retired versions and notes as in the same image of another store,
    /// as far as its versions exist here. The next number becomes the higher of both.
    pub fn follow(&mut self, other: &Self) {
        for version in &mut self.versions {
            if let Some(there) = other.versions.iter().find(|there| there.number == version.number)
                && there.manifest == version.manifest
            {
                version.retired = there.retired;
                version.note.clone_from(&there.note);
            }
        }
        let is_here = |pointer: &Pointer| {
            let manifest = |image: &Self| {
                image.versions.iter().find(|v| v.number == pointer.version).map(|version| version.manifest)
            };
            manifest(self).is_some() && manifest(self) == manifest(other)
        };
        let scheduled: Vec<Pointer> =
            other.scheduled.iter().filter(|pointer| is_here(pointer)).cloned().collect();
        let (pointers, cut_short) = other.places_where(is_here);
        self.pointers = pointers;
        self.cut_short = cut_short;
        self.scheduled = scheduled;
        self.next_number = self.next_number.max(other.next_number);
    }

    /// Changes the note of a version, even of a retired one. An empty note removes it. Returns the old note.
    pub fn set_note(&mut self, number: u32, note: &str) -> Result<String, StoreError> {
        let len = note.len();
        if len > NOTE_MAX_BYTES {
            let message = format!("the note has {len} bytes, and at most {NOTE_MAX_BYTES} are allowed");
            return Err(StoreError::new(StoreErrorKind::Invalid, message));
        }
        match self.versions.iter_mut().find(|version| version.number == number) {
            Some(version) => Ok(std::mem::replace(&mut version.note, note.to_owned())),
            None => Err(self.missing(&number.to_string())),
        }
    }

    /// The newest version that is not retired.
    pub fn newest(&self) -> Option<&Version> {
        self.versions.iter().rev().find(|version| !version.retired)
    }

    /// The version that the image's name alone means until `production` is set: the newest version that is
    /// not retired and does not contain the identity of one machine. A version with an identity can come from
    /// a copy of another store, where it was sealed, and such a copy need not set production. So production can be
    /// unset although a version has an identity.
    fn newest_for_all(&self) -> Result<&Version, StoreError> {
        let mut versions = self.versions.iter().rev().filter(|version| !version.retired);
        versions.clone().find(|version| !version.keeps_identity).ok_or_else(|| match versions.next() {
            Some(newest) => StoreError::new(
                StoreErrorKind::NotFound,
                format!(
                    "image '{0}' has only versions that are not generalised, and production is not set: name one, or \
                     promote it ('headwater image promote {0}@{1} production --force')",
                    self.name, newest.number
                ),
            ),
            None => self.without_versions(),
        })
    }

    /// The number of the version that a machine boots if it names only the image; `None` if there is none.
    pub fn booted(&self) -> Option<u32> {
        self.select(&Selector::Default).ok().map(|version| version.number)
    }

    /// The version that the selector means. The error lists the existing versions.
    pub fn select(&self, selector: &Selector) -> Result<&Version, StoreError> {
        match selector {
            Selector::Default => match self.channel(Channel::Production) {
                Some(pointer) => self.numbered(pointer.version),
                None => self.newest_for_all(),
            },
            Selector::Channel(Channel::Maintenance) => self.newest().ok_or_else(|| self.without_versions()),
            Selector::Channel(channel) => match self.channel(*channel) {
                Some(pointer) => self.numbered(pointer.version),
                None => Err(self.channel_not_set(*channel)),
            },
            Selector::Number(number) => self.numbered(*number),
            Selector::HashPrefix(prefix) => self.by_hash(prefix),
        }
    }

    fn numbered(&self, number: u32) -> Result<&Version, StoreError> {
        let found = self.versions.iter().find(|version| version.number == number);
        found.ok_or_else(|| self.missing(&number.to_string()))
    }

    fn by_hash(&self, prefix: &str) -> Result<&Version, StoreError> {
        let mut found: Option<&Version> = None;
        for version in &self.versions {
            if !version.manifest.to_string().starts_with(prefix) {
                continue;
            }
            if found.is_some_and(|other| other.manifest != version.manifest) {
                return Err(StoreError::new(
                    StoreErrorKind::Invalid,
                    format!("the hashes of several versions of '{}' start with {prefix}", self.name),
                ));
            }
            // The same content imported twice has one hash. The hash selects the newest of these numbers,
            // even if it is retired. Otherwise a user who retires or removes a version by its hash, and
            // repeats the command, would affect a second version.
            found = Some(version);
        }
        found.ok_or_else(|| self.missing(prefix))
    }

    fn missing(&self, what: &str) -> StoreError {
        let numbers: Vec<String> = self.versions.iter().map(|v| v.number.to_string()).collect();
        let has = if numbers.is_empty() { "none".to_owned() } else { numbers.join(", ") };
        StoreError::new(
            StoreErrorKind::NotFound,
            format!("image '{}' has no version {what}; it has {has}", self.name),
        )
    }

    fn without_versions(&self) -> StoreError {
        let why = if self.versions.is_empty() { "has no versions" } else { "has only retired versions" };
        StoreError::new(
            StoreErrorKind::NotFound,
            format!(
                "image '{}' {why}: import one, or bring one back ('headwater image retire --undo')",
                self.name
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image with versions 1 and 2, each with a note.
    fn image() -> Image {
        let mut image = Image::empty("deb".parse().unwrap());
        for number in [1u32, 2] {
            let version = Version {
                number,
                manifest: Hash::of(&number.to_le_bytes()),
                created_at_s: 0,
                size_bytes: 512,
                stored_bytes: 0,
                source: String::new(),
                note: format!("note {number}"),
                author: String::new(),
                retired: false,
                keeps_identity: false,
                objects: Vec::new(),
            };
            assert!(image.adopt(&version).unwrap().is_some());
        }
        image
    }

    fn notes(image: &Image) -> Vec<&str> {
        image.versions.iter().map(|version| version.note.as_str()).collect()
    }

    #[test]
    fn the_note_of_any_version_is_changed_and_nothing_else() {
        let mut image = image();
        image.retire(1, true).unwrap();
        let before = image.clone();
        let longest = "x".repeat(NOTE_MAX_BYTES);
        assert_eq!(image.set_note(1, &longest).unwrap(), "note 1");
        assert_eq!(image.set_note(2, "").unwrap(), "note 2");
        assert_eq!(notes(&image), [longest.as_str(), ""]);
        // A note of the maximal length can be written.
        assert_eq!(Image::decode(&image.name, &image.encode().unwrap()).unwrap(), image);
        for number in [1, 2] {
            image.set_note(number, &format!("note {number}")).unwrap();
        }
        assert_eq!(image, before);
    }

    #[test]
    fn notes_too_long_or_of_unknown_versions_are_refused() {
        let mut image = image();
        image.forget(1);
        let before = image.clone();
        // The limit counts bytes, not characters.
        let long = image.set_note(2, &"\u{e9}".repeat(NOTE_MAX_BYTES / 2 + 1)).unwrap_err();
        assert_eq!(long.kind(), StoreErrorKind::Invalid);
        assert_eq!(long.to_string(), "the note has 1026 bytes, and at most 1024 are allowed");
        for number in [1, 3] {
            let missing = image.set_note(number, "a").unwrap_err();
            assert_eq!(missing.kind(), StoreErrorKind::NotFound);
            assert!(missing.to_string().contains(&format!("no version {number}; it has 2")), "{missing}");
        }
        assert_eq!(image, before);
    }

    #[test]
    fn a_shared_hash_means_its_newest_version_even_if_retired() {
        let mut image = image();
        let again = Version { number: 3, ..image.versions[0].clone() };
        assert!(image.adopt(&again).unwrap().is_some());
        let by_hash = Selector::HashPrefix(again.manifest.to_string());
        let meant = |image: &Image| image.select(&by_hash).unwrap().number;
        let retired = |image: &Image| image.versions.iter().map(|it| it.retired).collect::<Vec<_>>();
        // Doing it twice has the same effect as once.
        for _ in 0..2 {
            image.retire(meant(&image), true).unwrap();
            assert_eq!(retired(&image), [false, false, true]);
        }
        image.retire(meant(&image), false).unwrap();
        assert_eq!(retired(&image), [false; 3]);
        // The retired version is removed.
        image.retire(meant(&image), true).unwrap();
        image.forget(meant(&image));
        assert_eq!((image.versions.len(), retired(&image)), (2, vec![false; 2]));
        // The same if an older version is retired.
        image.retire(1, true).unwrap();
        assert!(image.adopt(&again).unwrap().is_some());
        assert_eq!(meant(&image), 3);
    }

    #[test]
    fn notes_follow_another_store_as_far_as_its_versions_are_the_same() {
        let (mut here, mut there) = (image(), image());
        here.set_note(1, "ours").unwrap();
        there.set_note(1, "theirs").unwrap();
        there.set_note(2, "theirs").unwrap();
        // Each store has made a second version of its own.
        there.versions[1].manifest = Hash::of(b"another");
        here.follow(&there);
        assert_eq!(notes(&here), ["theirs", "note 2"]);
    }
}
