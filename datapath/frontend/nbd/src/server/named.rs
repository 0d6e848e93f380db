//! Several exports by name, each a disk of its own, and the access rights of client certificates.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Export, ExportInfo, Exports, NotOpened};
use crate::tls::ClientIdentity;

/// The exports that clients with a certificate may open, written `NAME` or `NAME=EXPORT[,EXPORT..]`. NAME is the common
/// name or a DNS name in the certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Right {
    client: String,
    /// `None`: all.
    exports: Option<Vec<String>>,
}

impl Right {
    /// Parses a right; `check` says what is wrong with the name of an export.
    pub fn parse(text: &str, check: impl Fn(&str) -> Result<(), String>) -> Result<Self, String> {
        let (client, exports) = match text.split_once('=') {
            None => (text, None),
            Some((client, exports)) => (client, Some(exports)),
        };
        if client.is_empty() {
            return Err("the client's name is missing: write NAME or NAME=EXPORT[,EXPORT..], where NAME is the common name or a DNS name in its certificate".into());
        }
        let exports = exports.map(|exports| {
            exports
                .split(',')
                .map(|name| check(name).map(|()| name.to_owned()))
                .collect::<Result<Vec<_>, _>>()
        });
        Ok(Self { client: client.to_owned(), exports: exports.transpose()? })
    }

    /// Whether any of these rights permits the client to open the export. Without any rights everybody may
    /// open everything.
    pub fn any_allows(rights: &[Self], client: &ClientIdentity, export: &str) -> bool {
        let allows = |right: &Self| {
            client.names.contains(&right.client)
                && right.exports.as_ref().is_none_or(|exports| exports.iter().any(|name| name == export))
        };
        rights.is_empty() || rights.iter().any(allows)
    }
}

/// Exports by name; there is no default export.
pub struct NamedExports {
    exports: BTreeMap<String, Export>,
    rights: Vec<Right>,
}

impl NamedExports {
    /// If two exports have one name, only the later one is served.
    pub fn new(exports: impl IntoIterator<Item = (String, Export)>, rights: Vec<Right>) -> Arc<Self> {
        Arc::new(Self { exports: exports.into_iter().collect(), rights })
    }
}

impl Exports for NamedExports {
    fn list(&self, client: &ClientIdentity) -> Vec<ExportInfo> {
        let seen = self.exports.iter().filter(|(name, _)| Right::any_allows(&self.rights, client, name));
        seen.map(|(name, export)| ExportInfo { name: name.clone(), description: export.description.clone() })
            .collect()
    }

    fn open(&self, name: &str, client: &ClientIdentity) -> Result<Export, NotOpened> {
        if name.is_empty() {
            return Err(NotOpened::Unavailable(
                "name an export: there is no default export; the client can list the exports".into(),
            ));
        }
        // Only clients that may have the export learn whether it exists.
        if !Right::any_allows(&self.rights, client, name) {
            return Err(NotOpened::Forbidden);
        }
        self.exports.get(name).cloned().ok_or(NotOpened::Unknown)
    }
}

#[cfg(test)]
mod tests {
    use headwater_testkit::ReferenceDisk;

    use super::*;

    fn right(text: &str) -> Result<Right, String> {
        Right::parse(text, |name| if name.is_empty() { Err("no name".into()) } else { Ok(()) })
    }

    #[test]
    fn rights_are_read() {
        let expected = |client: &str, exports: Option<&[&str]>| Right {
            client: client.into(),
            exports: exports.map(|all| all.iter().map(|name| (*name).to_owned()).collect()),
        };
        assert_eq!(right("backup"), Ok(expected("backup", None)));
        assert_eq!(right("desk 7=a,b"), Ok(expected("desk 7", Some(&["a", "b"]))));
        for bad in ["", "=a", "x=", "x=a,"] {
            assert!(right(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn exports_are_listed_and_opened_only_for_permitted_clients() {
        let export = |mib: u64| Export {
            device: Arc::new(ReferenceDisk::new(mib << 20)),
            description: format!("{mib} MiB"),
        };
        let exports = || [("a".to_owned(), export(1)), ("b".to_owned(), export(2))];
        let client = |name: &str| ClientIdentity { is_encrypted: true, names: vec![name.to_owned()] };
        let names = |exports: &NamedExports, who: &ClientIdentity| {
            exports.list(who).into_iter().map(|export| export.name).collect::<Vec<_>>()
        };
        let size = |exports: &NamedExports, name: &str, who: &ClientIdentity| {
            exports.open(name, who).map(|export| export.device.geometry().size_bytes >> 20)
        };
        let limited = NamedExports::new(exports(), vec![right("one=a").unwrap(), right("all").unwrap()]);
        let (one, all, other) = (client("one"), client("all"), client("other"));
        assert_eq!(names(&limited, &one), ["a"]);
        assert_eq!(names(&limited, &all), ["a", "b"]);
        assert!(names(&limited, &other).is_empty());
        assert_eq!(size(&limited, "a", &one), Ok(1));
        assert_eq!(size(&limited, "b", &all), Ok(2));
        assert_eq!(size(&limited, "c", &all), Err(NotOpened::Unknown));
        for (name, who) in [("b", &one), ("c", &one), ("a", &other)] {
            assert_eq!(size(&limited, name, who), Err(NotOpened::Forbidden), "{name}");
        }
        let open = NamedExports::new(exports(), Vec::new());
        assert_eq!(size(&open, "b", &ClientIdentity::default()), Ok(2));
        assert!(matches!(size(&open, "", &all), Err(NotOpened::Unavailable(_))));
    }
}
