//! Copying versions from one store to another: for `store copy`, `store sync` and `image pull`.

use headwater_api::Progress;
use headwater_image::Manifests;
use headwater_store::copy::{OnImage, OnProgress, Readable, everything_readable, selected};
use headwater_store::{
    Copied, CopyProgress, Image, ImageName, ImageReference, NotCopied, Store, StoreError, StoreErrorKind,
    Version, copy_telling,
};

/// The selection of versions to copy from a store.
pub struct Chosen {
    /// The versions, by image.
    pub what: Vec<(Image, Vec<Version>)>,
    /// Images that cannot be copied because a version list cannot be read: the store of the list, and the error.
    pub unreadable: Vec<(String, StoreError)>,
    /// Whether channels, scheduled promotions, notes and retired marks are copied too.
    pub with_channels: bool,
}

impl Chosen {
    /// Selects these versions of `source`, or with `None` all versions and the channels.
    pub fn of(source: &dyn Store, references: Option<&[ImageReference]>) -> Result<Self, StoreError> {
        if let Some(references) = references {
            let what = selected(source, references)?;
            return Ok(Self { what, unreadable: Vec::new(), with_channels: false });
        }
        let Readable { what, unreadable } = everything_readable(source)?;
        Ok(Self { what, unreadable: lists(unreadable, source), with_channels: true })
    }

    /// If everything is selected, leaves out images whose version lists in `target` cannot be changed.
    pub fn writable_in(self, target: &dyn Store) -> Result<Self, StoreError> {
        let Self { what, mut unreadable, with_channels } = self;
        if !with_channels {
            return Ok(Self { what, unreadable, with_channels });
        }
        let there = Readable { what, unreadable: Vec::new() }.writable_in(target)?;
        unreadable.append(&mut lists(there.unreadable, target));
        Ok(Self { what: there.what, unreadable, with_channels })
    }

    /// Copies the selection.
    pub fn copy(
        &self,
        source: &dyn Store,
        target: &dyn Store,
        (progress, told): (&mut OnProgress<'_>, &mut OnImage<'_>),
    ) -> Result<Copied, StoreError> {
        copy_telling(source, target, &self.what, &Manifests, self.with_channels, (progress, told))
    }

    /// Everything that was not copied, each with its reason.
    pub fn not_copied(self, failed: Vec<NotCopied>) -> Vec<(String, StoreError)> {
        let versions = failed.into_iter().map(|it| (format!("{}@{}", it.image, it.number), it.error));
        self.unreadable.into_iter().chain(versions).collect()
    }
}

fn lists(unreadable: Vec<(ImageName, StoreError)>, store: &dyn Store) -> Vec<(String, StoreError)> {
    let told = |name: ImageName| format!("{name} (its list of versions in {})", store.shown());
    unreadable.into_iter().map(|(name, e)| (told(name), e)).collect()
}

/// The error of a copy that was stopped.
pub fn stopped() -> StoreError {
    StoreError::new(StoreErrorKind::Io, "stopped; the same command continues where this one ended")
}

/// The progress of a copy. The total is known once all manifests are read.
pub fn progress_of(at: &CopyProgress) -> Progress {
    let CopyProgress { done_bytes, total_bytes, versions, read_versions, done_versions } = *at;
    let doing = if read_versions < versions {
        Some(format!("reading manifests: {read_versions} of {versions} versions"))
    } else if total_bytes == 0 {
        Some(format!("no data to copy; {done_versions} of {versions} versions are done"))
    } else {
        None
    };
    Progress { done_bytes, total_bytes, doing }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_says_what_it_does_before_there_are_bytes_and_where_there_are_none() {
        let doing = |total_bytes, read_versions, done_versions| {
            let at = CopyProgress {
                total_bytes,
                versions: 10,
                read_versions,
                done_versions,
                ..CopyProgress::default()
            };
            progress_of(&at).doing
        };
        let says = |words: &str| Some(words.to_owned());
        assert_eq!(doing(0, 3, 0), says("reading manifests: 3 of 10 versions"));
        // The missing data is not known yet.
        assert_eq!(doing(5000, 9, 0), says("reading manifests: 9 of 10 versions"));
        assert_eq!(doing(5000, 10, 1), None);
        assert_eq!(doing(0, 10, 4), says("no data to copy; 4 of 10 versions are done"));
    }
}
