//! Pictures of a machine's screen: every build of QEMU writes PPM, but some builds cannot write PNG. So this module
//! converts PPM to PNG.

use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::Crc;
use flate2::write::ZlibEncoder;

use crate::error::{Error, Result};

/// The largest picture that is read, in bytes: the memory of QEMU's graphics card is smaller by far.
pub const MAX_SCREEN_BYTES: u64 = 256 << 20;

/// The signature of a PNG file.
const SIGNATURE: [u8; 8] = *b"\x89PNG\r\n\x1a\n";

/// Reads a PPM file that QEMU wrote, and converts it to PNG.
pub(crate) fn read_as_png(path: &Path) -> Result<Vec<u8>> {
    let describe = || Error::io("read the picture", path);
    let size_bytes = std::fs::metadata(path).map_err(describe())?.len();
    let invalid = |why: String| describe()(std::io::Error::new(std::io::ErrorKind::InvalidData, why));
    if size_bytes > MAX_SCREEN_BYTES {
        return Err(invalid(format!("it has {size_bytes} bytes, and at most {MAX_SCREEN_BYTES} are read")));
    }
    let picture = std::fs::read(path).map_err(describe())?;
    let picture = Picture::parse(&picture).map_err(invalid)?;
    picture.to_png().map_err(describe())
}

/// A picture with three bytes per pixel.
#[derive(Debug, PartialEq, Eq)]
struct Picture<'a> {
    width: u32,
    height: u32,
    pixels: &'a [u8],
}

impl<'a> Picture<'a> {
    /// Reads a PPM as QEMU writes it: `P6`, width and height, and the largest value 255, each followed by white space.
    fn parse(bytes: &'a [u8]) -> std::result::Result<Self, String> {
        let odd = || "it is not a PPM with 8 bits per channel".to_owned();
        let mut rest = bytes;
        let mut word = || -> Option<&str> {
            let end = rest.iter().position(u8::is_ascii_whitespace)?;
            let (word, after) = rest.split_at_checked(end)?;
            rest = after.get(1..)?;
            std::str::from_utf8(word).ok()
        };
        if word() != Some("P6") {
            return Err(odd());
        }
        let mut number = || word().and_then(|word| word.parse::<u32>().ok());
        let (Some(width), Some(height), Some(255)) = (number(), number(), number()) else {
            return Err(odd());
        };
        let want = u64::from(width).saturating_mul(u64::from(height)).saturating_mul(3);
        if want == 0 || want != u64::try_from(rest.len()).unwrap_or(u64::MAX) {
            return Err(format!("it has {} bytes of data for {width} x {height} pixels", rest.len()));
        }
        Ok(Self { width, height, pixels: rest })
    }

    fn to_png(&self) -> std::io::Result<Vec<u8>> {
        let mut png = SIGNATURE.to_vec();
        let mut header = Vec::new();
        header.extend_from_slice(&self.width.to_be_bytes());
        header.extend_from_slice(&self.height.to_be_bytes());
        // Eight bits per colour, RGB; standard compression and filters, no interlacing.
        header.extend_from_slice(&[8, 2, 0, 0, 0]);
        chunk(&mut png, *b"IHDR", &header);
        let mut packed = ZlibEncoder::new(Vec::new(), Compression::default());
        let row_bytes = usize::try_from(self.width).unwrap_or(usize::MAX).saturating_mul(3);
        for row in self.pixels.chunks(row_bytes) {
            // Filter type 0: the line is not filtered.
            packed.write_all(&[0])?;
            packed.write_all(row)?;
        }
        chunk(&mut png, *b"IDAT", &packed.finish()?);
        chunk(&mut png, *b"IEND", &[]);
        Ok(png)
    }
}

/// Adds a part of a PNG: length, name, contents, and the checksum of name and contents.
fn chunk(png: &mut Vec<u8>, name: [u8; 4], contents: &[u8]) {
    // A picture is smaller than MAX_SCREEN_BYTES, and packing adds little.
    let len = u32::try_from(contents.len()).unwrap_or(u32::MAX);
    let mut sum = Crc::new();
    sum.update(&name);
    sum.update(contents);
    png.extend_from_slice(&len.to_be_bytes());
    png.extend_from_slice(&name);
    png.extend_from_slice(contents);
    png.extend_from_slice(&sum.sum().to_be_bytes());
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Python reads the PNG with its own zlib and CRC.
    #[test]
    fn python_reads_the_pixels_that_qemu_wrote() {
        let dir = tempfile::tempdir().unwrap();
        let pixels: Vec<u8> = (0..5 * 3 * 3).map(|n: u8| n.wrapping_mul(37)).collect();
        let ppm = [b"P6\n5 3\n255\n".as_slice(), &pixels].concat();
        let (from, to) = (dir.path().join("screen.ppm"), dir.path().join("screen.png"));
        std::fs::write(&from, ppm).unwrap();
        std::fs::write(&to, read_as_png(&from).unwrap()).unwrap();
        let script = "import struct, sys, zlib\n\
            data = open(sys.argv[1], 'rb').read()\n\
            assert data[:8] == bytes([137, 80, 78, 71, 13, 10, 26, 10])\n\
            at, parts = 8, []\n\
            while at < len(data):\n\
            \x20   size, name = struct.unpack('>I4s', data[at:at + 8])\n\
            \x20   body = data[at + 8:at + 8 + size]\n\
            \x20   assert struct.unpack('>I', data[at + 8 + size:at + 12 + size])[0] == zlib.crc32(name + body)\n\
            \x20   parts.append((name, body))\n\
            \x20   at += 12 + size\n\
            assert [name for name, _ in parts] == [b'IHDR', b'IDAT', b'IEND']\n\
            width, height = struct.unpack('>II', parts[0][1][:8])\n\
            rows = zlib.decompress(parts[1][1])\n\
            step = 1 + 3 * width\n\
            assert all(rows[n * step] == 0 for n in range(height))\n\
            pixels = b''.join(rows[n * step + 1:(n + 1) * step] for n in range(height))\n\
            print(width, height, parts[0][1][8:].hex(), pixels.hex())\n";
        let ran =
            Command::new("python3").args(["-c", script]).arg(&to).output().expect("apt-get install python3");
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        let hex: String = pixels.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(String::from_utf8_lossy(&ran.stdout), format!("5 3 0802000000 {hex}\n"));
    }

    #[test]
    fn an_invalid_picture_is_an_error() {
        let good = b"P6\n1 1\n255\nabc";
        assert_eq!(Picture::parse(good), Ok(Picture { width: 1, height: 1, pixels: b"abc" }));
        for bad in [
            b"".as_slice(),
            b"P5\n1 1\n255\nabc",
            b"P6\n1 1\n65535\nabc",
            b"P6\n1 1\n255\nab",
            b"P6\n1 1\n255\nabcd",
            b"P6\n0 1\n255\n",
            b"P6\n4294967295 4294967295\n255\nabc",
            b"P6\n1",
        ] {
            assert!(Picture::parse(bad).is_err(), "{bad:?}");
        }
    }
}
