//! Scopes: the only catalogs and images on which a caller may act. Decides whether a scope contains a name;
//! `control/service` asks it for each request.
//!
//! A machine of a catalog belongs to the catalog. A machine without a catalog belongs to its image.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::filter::is_like;
use crate::name::MAX_NAME_BYTES;
use crate::problem::{Problem, ProblemKind};

/// The most patterns of one kind.
pub const SCOPES_MAX: usize = 32;

/// The only catalogs and images that a caller sees and may act on, within the permissions of its role. In a pattern, `*`
/// stands for any characters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Scopes {
    /// Patterns of names of catalogs. Their machines, claims, tasks and events belong to them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub catalogs: Vec<String>,
    /// Patterns of names of images. Their versions, and machines without a catalog that boot them, belong to them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<String>,
}

impl Scopes {
    /// Checks that there is at least one pattern, and that each pattern can match a name.
    pub fn check(&self) -> Result<(), Problem> {
        let invalid = |message: String| Err(Problem::new(ProblemKind::Invalid, message));
        if self.catalogs.is_empty() && self.images.is_empty() {
            return invalid(
                "the scopes are empty, so they would permit nothing: give at least one catalog or image"
                    .to_owned(),
            );
        }
        if self.catalogs.len() > SCOPES_MAX || self.images.len() > SCOPES_MAX {
            return invalid(format!("at most {SCOPES_MAX} catalogs and {SCOPES_MAX} images can be given"));
        }
        let is_pattern = |more: &[u8], pattern: &String| {
            let known = |b: u8| {
                b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'*') || more.contains(&b)
            };
            !pattern.is_empty() && pattern.len() <= MAX_NAME_BYTES && pattern.bytes().all(known)
        };
        let invalid_pattern = |what: &str, pattern: &String| {
            let message = format!(
                "'{}' is neither the name of {what} nor a pattern of such names",
                pattern.escape_debug()
            );
            let advice =
                "use the name, or a part of it with '*', such as class-*; a scope has no version or channel";
            Err(Problem::new(ProblemKind::Invalid, message).advise(advice))
        };
        if let Some(pattern) = self.catalogs.iter().find(|pattern| !is_pattern(b"", pattern)) {
            return invalid_pattern("a catalog", pattern);
        }
        if let Some(pattern) = self.images.iter().find(|pattern| !is_pattern(b"_.", pattern)) {
            return invalid_pattern("an image", pattern);
        }
        Ok(())
    }

    /// Parses the output of `Display`: words such as `catalog:class-*` and `image:debian`.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        let mut scopes = Self::default();
        for word in text.split_whitespace() {
            match word.split_once(':') {
                Some(("catalog", pattern)) => scopes.catalogs.push(pattern.to_owned()),
                Some(("image", pattern)) => scopes.images.push(pattern.to_owned()),
                _ => {
                    let message = format!("'{}' is not a scope", word.escape_debug());
                    return Err(Problem::new(ProblemKind::Invalid, message)
                        .advise("write for instance: catalog:class-* image:debian"));
                }
            }
        }
        scopes.check().map(|()| scopes)
    }

    /// Whether the scopes contain a catalog.
    pub fn has_catalog(&self, catalog: &str) -> bool {
        self.catalogs.iter().any(|pattern| is_like(pattern, catalog))
    }

    /// Whether the scopes contain an image, given as a name or a reference to a version.
    pub fn has_image(&self, reference: &str) -> bool {
        let image = image_of(reference);
        self.images.iter().any(|pattern| is_like(pattern, image))
    }

    /// Whether the scopes contain a machine, given its catalog and image.
    pub fn has_machine(&self, catalog: Option<&str>, image: &str) -> bool {
        catalog.map_or_else(|| self.has_image(image), |catalog| self.has_catalog(catalog))
    }
}

/// The name of the image in a reference: `debian` in `debian:test` and `debian@3`.
pub fn image_of(reference: &str) -> &str {
    reference.split([':', '@']).next().unwrap_or_default()
}

impl std::fmt::Display for Scopes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let catalogs = self.catalogs.iter().map(|pattern| format!("catalog:{pattern}"));
        let images = self.images.iter().map(|pattern| format!("image:{pattern}"));
        f.write_str(&catalogs.chain(images).collect::<Vec<_>>().join(" "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scopes(catalogs: &[&str], images: &[&str]) -> Scopes {
        let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        Scopes { catalogs: owned(catalogs), images: owned(images) }
    }

    #[test]
    fn a_machine_belongs_to_its_catalog_or_else_its_image() {
        let scopes = scopes(&["class-*", "lab"], &["debian"]);
        assert!(scopes.has_catalog("class-7") && scopes.has_catalog("lab") && !scopes.has_catalog("lab-2"));
        for image in ["debian", "debian:test", "debian@3"] {
            assert!(scopes.has_image(image) && scopes.has_machine(None, image), "{image}");
            assert!(!scopes.has_machine(Some("other"), image), "{image}");
        }
        assert!(!scopes.has_image("debian-12") && !scopes.has_image("windows@3") && !scopes.has_image(""));
        assert!(scopes.has_machine(Some("class-7"), "windows"));
        assert!(!Scopes::default().has_catalog("") && !Scopes::default().has_image("debian"));
        assert_eq!(scopes.to_string(), "catalog:class-* catalog:lab image:debian");
        assert_eq!(Scopes::parse(&scopes.to_string()), Ok(scopes));
    }

    #[test]
    fn only_patterns_of_names_are_scopes() {
        for good in [scopes(&["*"], &[]), scopes(&[], &["win_11.*"]), scopes(&["a-1"], &["b"])] {
            assert_eq!(good.check(), Ok(()), "{good}");
        }
        let many: Vec<_> = (0..=SCOPES_MAX).map(|n| format!("c{n}")).collect();
        for odd in [
            scopes(&[], &[]),
            scopes(&[""], &[]),
            scopes(&["Class"], &[]),
            scopes(&["a_b"], &[]),
            scopes(&[], &["debian@3"]),
            scopes(&[], &["debian:test"]),
            scopes(&[], &["a,b"]),
            Scopes { catalogs: many, images: Vec::new() },
        ] {
            assert!(odd.check().is_err() && Scopes::parse(&odd.to_string()).is_err(), "{odd}");
        }
        for odd in ["class", "machine:pc", "catalog"] {
            assert!(Scopes::parse(odd).is_err(), "{odd}");
        }
    }
}
