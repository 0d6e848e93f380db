//! The client's half of an NBD handshake; afterwards the socket is given to the kernel.

use std::io::{Error, ErrorKind, Read, Write};

const GREETING: u64 = 0x4e42_444d_4147_4943;
const OPTION: u64 = 0x4948_4156_454f_5054;
const REPLY: u64 = 0x0003_e889_0455_65a9;
const GO: u32 = 7;
const ACK: u32 = 1;
const INFO: u32 = 3;
const ERROR_BIT: u32 = 1 << 31;
const INFO_EXPORT: u16 = 0;
const FIXED_NEWSTYLE_NO_ZEROES: u16 = 3;
/// Longer than any reply of our own server.
const LONGEST_REPLY_BYTES: u32 = 64 << 10;

/// The server's description of its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Export {
    pub(super) size_bytes: u64,
    pub(super) flags: u16,
}

/// Opens the default export. Afterwards the stream carries requests.
pub(super) fn shake_hands(stream: &mut (impl Read + Write)) -> std::io::Result<Export> {
    let odd = |what: &str| Error::new(ErrorKind::InvalidData, format!("the NBD server {what}"));
    if u64_from(stream)? != GREETING || u64_from(stream)? != OPTION || u16_from(stream)? & 1 == 0 {
        return Err(odd("sent a wrong greeting"));
    }
    let mut go = Vec::new();
    go.extend(u32::from(FIXED_NEWSTYLE_NO_ZEROES).to_be_bytes());
    go.extend(OPTION.to_be_bytes());
    go.extend(GO.to_be_bytes());
    // The option's data: an empty name, and no requests for more information.
    go.extend(6_u32.to_be_bytes());
    go.extend([0; 6]);
    stream.write_all(&go)?;
    let mut export = None;
    loop {
        if u64_from(stream)? != REPLY || u32_from(stream)? != GO {
            return Err(odd("sent a reply to another option"));
        }
        let (kind, len) = (u32_from(stream)?, u32_from(stream)?);
        if len > LONGEST_REPLY_BYTES {
            return Err(odd("sent a reply that is too long"));
        }
        let mut data = vec![0; usize::try_from(len).unwrap_or(0)];
        stream.read_exact(&mut data)?;
        match kind {
            ACK => return export.ok_or_else(|| odd("did not send the size of its disk")),
            INFO => {
                let mut data = data.as_slice();
                if u16_from(&mut data)? == INFO_EXPORT {
                    export = Some(Export { size_bytes: u64_from(&mut data)?, flags: u16_from(&mut data)? });
                }
            }
            kind if kind & ERROR_BIT != 0 => {
                return Err(odd(&format!("refuses: {}", String::from_utf8_lossy(&data))));
            }
            _ => {}
        }
    }
}

fn array<const BYTES: usize>(stream: &mut impl Read) -> std::io::Result<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn u16_from(stream: &mut impl Read) -> std::io::Result<u16> {
    array(stream).map(u16::from_be_bytes)
}

fn u32_from(stream: &mut impl Read) -> std::io::Result<u32> {
    array(stream).map(u32::from_be_bytes)
}

fn u64_from(stream: &mut impl Read) -> std::io::Result<u64> {
    array(stream).map(u64::from_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server whose answers are all written in advance.
    struct Script(std::io::Cursor<Vec<u8>>, Vec<u8>);

    impl Read for Script {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            self.0.read(buffer)
        }
    }

    impl Write for Script {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.1.write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn script(replies: &[(u32, &[u8])]) -> Script {
        let mut said = [GREETING.to_be_bytes(), OPTION.to_be_bytes()].concat();
        said.extend(3_u16.to_be_bytes());
        for (kind, data) in replies {
            said.extend(REPLY.to_be_bytes());
            said.extend(GO.to_be_bytes());
            said.extend(kind.to_be_bytes());
            said.extend(u32::try_from(data.len()).unwrap().to_be_bytes());
            said.extend(*data);
        }
        Script(std::io::Cursor::new(said), Vec::new())
    }

    #[test]
    fn an_export_is_chosen_and_refusals_are_told() {
        let info = [&[0, 0][..], &(1_u64 << 30).to_be_bytes(), &[0, 5]].concat();
        let other = [0, 3, 0, 0, 2, 0];
        let mut server = script(&[(INFO, &other), (INFO, &info), (ACK, &[])]);
        assert_eq!(shake_hands(&mut server).unwrap(), Export { size_bytes: 1 << 30, flags: 5 });
        assert_eq!(server.1.len(), 4 + 16 + 6);
        let error = shake_hands(&mut script(&[(ERROR_BIT | 6, b"no such disk")])).unwrap_err();
        assert!(error.to_string().contains("no such disk"), "{error}");
        assert!(shake_hands(&mut script(&[(ACK, &[])])).is_err());
        for len in 0..40 {
            let mut server = script(&[(INFO, &info)]);
            server.0.get_mut().truncate(len);
            assert!(shake_hands(&mut server).is_err());
        }
    }
}
