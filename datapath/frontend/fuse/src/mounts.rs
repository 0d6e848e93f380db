//! Reads the table of mounts, `/proc/self/mountinfo`.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One line of the table.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Mounted {
    /// Id of the mount; unique while it exists.
    pub(crate) id: u64,
    /// File system type.
    pub(crate) kind: String,
    point: PathBuf,
}

/// The file system that is mounted at `point`; the topmost if there are several.
pub(crate) fn at(point: &Path) -> std::io::Result<Option<Mounted>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(parse(&table).into_iter().rfind(|mounted| mounted.point == point))
}

fn parse(table: &[u8]) -> Vec<Mounted> {
    table.split(|byte| *byte == b'\n').filter_map(parse_line).collect()
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`, see proc(5).
fn parse_line(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let point = unescape(fields.nth(3)?);
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    Some(Mounted { id, kind: String::from_utf8_lossy(kind).into_owned(), point })
}

/// Decodes a path of mountinfo, in which blanks and backslashes are written as a backslash and three octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::new();
    let mut rest = field;
    while let Some((first, behind)) = rest.split_first() {
        let octal = behind.first_chunk::<3>().and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()).filter(|_| *first == b'\\') {
            Some(byte) => {
                out.push(byte);
                rest = behind.get(3..).unwrap_or_default();
            }
            None => {
                out.push(*first);
                rest = behind;
            }
        }
    }
    PathBuf::from(OsString::from_vec(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_read_with_optional_fields_and_escapes() {
        let table = b"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n\
            36 22 0:44 / /mnt/a\\040b rw,nosuid shared:7 master:1 - fuse.headwater headwater rw\nnonsense\n";
        let all = parse(table);
        assert_eq!(all.len(), 2);
        assert_eq!(all[1], Mounted { id: 36, kind: "fuse.headwater".into(), point: "/mnt/a b".into() });
        assert!(at(Path::new("/proc")).unwrap().is_some());
        assert!(at(Path::new("/no such place")).unwrap().is_none());
    }
}
