//! Reads files that a command line names, such as tokens, secrets and certificates, up to a maximum size.
//!
//! The limit also ends the reading of devices and pipes that have no end.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

use crate::size;

/// The most that is read of a PEM file. The certificate authorities of a whole system take a quarter of a
/// MiB.
pub const PEM_MAX_BYTES: u64 = 16 << 20;

/// Reads a file of at most `max_bytes`; a longer one is an error of the kind `InvalidData`.
pub fn read(path: &Path, max_bytes: u64) -> Result<Vec<u8>> {
    read_open(File::open(path)?, max_bytes)
}

/// As [`read`], of an open file.
pub fn read_open(file: File, max_bytes: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // One byte more than the limit shows that the file is longer.
    file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).is_ok_and(|len| len <= max_bytes) {
        return Ok(bytes);
    }
    let why = format!("it has more than {}, the most that is read", size::format(max_bytes));
    Err(Error::new(ErrorKind::InvalidData, why))
}

/// Converts bytes of [`read`] to text. Bytes that are not UTF-8 are an error of the kind `InvalidData`.
pub fn text(bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|_| Error::new(ErrorKind::InvalidData, "it is not text in UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_an_end_is_read_up_to_a_limit() {
        let error = read(Path::new("/dev/zero"), 1 << 20).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
        assert!(error.to_string().contains("more than 1.0 MiB"), "{error}");
        assert_eq!(read(Path::new("/dev/null"), 0).unwrap(), b"");
        let own = std::env::current_exe().unwrap();
        let len = own.metadata().unwrap().len();
        assert_eq!(read(&own, len).unwrap().len() as u64, len);
        assert_eq!(read(&own, len - 1).unwrap_err().kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn files_that_are_no_text_are_reported() {
        assert_eq!(text(b"a".to_vec()).unwrap(), "a");
        assert!(text(vec![0xff]).unwrap_err().to_string().contains("UTF-8"));
    }
}
