//! Inspects a UEFI loader: its architecture, its SBAT entries, the names in its signatures, and whether it supports
//! HTTP.
//!
//! ```text
//!   "MZ" .. 3c: --> "PE\0\0" machine, sections, optional header --> data directory 4: signatures (PKCS #7, names in it)
//!                                     .sbat: lines "component,generation,vendor,..,version"
//! ```
//! Signatures are not verified here, because the firmware verifies them. The names are only shown to people.

/// The architecture of the loaders: 64-bit x86.
const X64: u16 = 0x8664;
const OPTIONAL_64: u16 = 0x20b;
const SECTION_BYTES: usize = 40;
/// DER: the object identifier 2.5.4.3, common name.
const COMMON_NAME: [u8; 3] = [0x55, 0x04, 0x03];
/// DER: UTF8String and PrintableString.
const TEXTS: [u8; 2] = [0x0c, 0x13];

/// The result of an inspection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Efi {
    /// Its SBAT entries: component, generation, version.
    pub sbat: Vec<(String, u32, String)>,
    /// Distinct common names in its signatures, in order of appearance.
    pub names: Vec<String>,
    /// Whether it can fetch files over HTTP.
    pub has_http: bool,
}

/// Why a file cannot be served as a loader.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EfiError {
    /// Not a UEFI program.
    #[error("it is not a UEFI program")]
    NotPe,
    /// Built for another architecture, given by its number.
    #[error("it is built for architecture {0:#06x}, not for 64-bit x86")]
    Architecture(u16),
    /// No signature.
    #[error("it has no signature, so firmware with Secure Boot refuses it")]
    Unsigned,
    /// No SBAT section.
    #[error("it has no section .sbat, so shim refuses it")]
    NoSbat,
}

impl Efi {
    /// Inspects a signed loader. Every loader must have an `.sbat` section, although firmware does not check that of
    /// shim.
    pub fn inspect(bytes: &[u8]) -> Result<Self, EfiError> {
        if bytes.get(..2) != Some(b"MZ") {
            return Err(EfiError::NotPe);
        }
        let pe = number::<4>(bytes, 0x3c).ok_or(EfiError::NotPe)?;
        if bytes.get(pe..).and_then(|rest| rest.get(..4)) != Some(b"PE\0\0") {
            return Err(EfiError::NotPe);
        }
        let field = |at: usize| number::<2>(bytes, pe.saturating_add(at)).ok_or(EfiError::NotPe);
        let (machine, sections, optional_bytes) = (field(4)?, field(6)?, field(20)?);
        let machine = u16::try_from(machine).unwrap_or(0);
        if machine != X64 || field(24)? != usize::from(OPTIONAL_64) {
            return Err(EfiError::Architecture(machine));
        }
        let optional = pe.saturating_add(24);
        let signatures = part(bytes, optional.saturating_add(112 + 4 * 8), false).unwrap_or_default();
        if signatures.is_empty() {
            return Err(EfiError::Unsigned);
        }
        let first = optional.saturating_add(optional_bytes);
        let sbat = (0..sections).find_map(|section| {
            let header = first.saturating_add(section * SECTION_BYTES);
            let is_sbat = bytes.get(header..)?.get(..8)? == b".sbat\0\0\0";
            is_sbat.then(|| part(bytes, header.saturating_add(16), true))?
        });
        Ok(Self {
            sbat: entries(sbat.ok_or(EfiError::NoSbat)?),
            names: names(signatures),
            has_http: bytes.windows(8).any(|window| window == b"HTTP/1.1"),
        })
    }

    /// The version of a component.
    pub fn version(&self, component: &str) -> Option<&str> {
        self.sbat.iter().find(|(name, ..)| name == component).map(|(.., version)| version.as_str())
    }

    /// Its SBAT entries as text: `grub,5 grub.debian,5`.
    pub fn levels(&self) -> String {
        let own = self.sbat.iter().filter(|(name, ..)| name != "sbat");
        own.map(|(name, generation, _)| format!("{name},{generation}")).collect::<Vec<_>>().join(" ")
    }
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<usize> {
    let field = bytes.get(at..)?.first_chunk::<N>()?;
    let value = field.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte));
    usize::try_from(value).ok()
}

/// The part of the file whose offset and length are stored at `at`, in the order that `is_length_first` says.
fn part(bytes: &[u8], at: usize, is_length_first: bool) -> Option<&[u8]> {
    let (first, second) = (number::<4>(bytes, at)?, number::<4>(bytes, at.checked_add(4)?)?);
    let (place, len) = if is_length_first { (second, first) } else { (first, second) };
    bytes.get(place..)?.get(..len)
}

fn entries(section: &[u8]) -> Vec<(String, u32, String)> {
    let text = section.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text);
    let lines = text.lines().filter_map(|line| {
        let mut fields = line.split(',');
        let (component, generation) = (fields.next()?, fields.next()?.parse().ok()?);
        Some((component.to_owned(), generation, fields.nth(2).unwrap_or_default().to_owned()))
    });
    lines.collect()
}

fn names(signatures: &[u8]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for at in 0..signatures.len() {
        let Some([a, b, c, kind, len, rest @ ..]) = signatures.get(at..) else { break };
        if [*a, *b, *c] != COMMON_NAME || !TEXTS.contains(kind) {
            continue;
        }
        let name = rest.get(..usize::from(*len)).and_then(|name| std::str::from_utf8(name).ok());
        if let Some(name) = name.filter(|name| !names.iter().any(|known| known == name)) {
            names.push(name.to_owned());
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The smallest valid loader.
    fn loader() -> Vec<u8> {
        let mut bytes = vec![0; 0x400];
        let mut put = |at: usize, what: &[u8]| bytes[at..at + what.len()].copy_from_slice(what);
        put(0, b"MZ");
        put(0x3c, &0x80u32.to_le_bytes());
        put(0x80, b"PE\0\0");
        put(0x84, &X64.to_le_bytes());
        put(0x86, &1u16.to_le_bytes());
        put(0x94, &240u16.to_le_bytes());
        put(0x98, &OPTIONAL_64.to_le_bytes());
        // Data directory 4: 32 bytes at 0x300.
        put(0x98 + 112 + 32, &[0, 3, 0, 0, 32, 0, 0, 0]);
        put(0x98 + 240, b".sbat\0\0\0");
        put(0x98 + 240 + 16, &[0x80, 0, 0, 0, 0, 2, 0, 0]);
        put(0x200, b"sbat,1,SBAT,sbat,1,url\ngrub,5,FSF,grub,2.12,url\n");
        put(0x300, &[0x30, 0x0b, 0x55, 0x04, 0x03, 0x0c, 4]);
        put(0x307, b"Test");
        put(0x3c0, b" HTTP/1.1");
        bytes
    }

    #[test]
    fn a_loader_names_its_version_level_and_signer() {
        let efi = Efi::inspect(&loader()).unwrap();
        assert_eq!((efi.version("grub"), efi.levels().as_str()), (Some("2.12"), "grub,5"));
        assert_eq!((efi.names.as_slice(), efi.has_http), (&["Test".to_owned()][..], true));
    }

    #[test]
    fn loaders_that_firmware_would_refuse_are_refused() {
        let refused = |change: fn(&mut Vec<u8>)| {
            let mut bytes = loader();
            change(&mut bytes);
            Efi::inspect(&bytes).unwrap_err()
        };
        assert_eq!(refused(|bytes| bytes.truncate(1)), EfiError::NotPe);
        assert_eq!(refused(|bytes| bytes[0] = b'X'), EfiError::NotPe);
        assert_eq!(refused(|bytes| bytes[0x3f] = 0xff), EfiError::NotPe);
        assert_eq!(
            refused(|bytes| bytes[0x84..0x86].copy_from_slice(&[0x64, 0xaa])),
            EfiError::Architecture(0xaa64)
        );
        assert_eq!(refused(|bytes| bytes[0x98 + 112 + 36] = 0), EfiError::Unsigned);
        assert_eq!(refused(|bytes| bytes[0x98 + 240] = b'x'), EfiError::NoSbat);
        assert_eq!(refused(|bytes| bytes.truncate(0x240)), EfiError::Unsigned);
    }

    #[test]
    fn arbitrary_files_cause_no_panic() {
        let whole = loader();
        for at in 0..whole.len() {
            for value in [0, 0x7f, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = value;
                let _ = Efi::inspect(&bytes);
            }
            let _ = Efi::inspect(&whole[..at]);
        }
    }
}
