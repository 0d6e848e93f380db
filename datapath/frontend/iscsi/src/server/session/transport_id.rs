//! The identity of initiators: the TransportID of SPC.

use crate::name::IscsiName;

/// The TransportID of an initiator port (SPC-4, 7.6.4.6): its name and its ISID.
pub(super) fn transport_id(initiator: &IscsiName, isid: [u8; 6]) -> Box<[u8]> {
    let isid = isid.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"));
    let mut name = format!("{initiator},i,0x{isid}").into_bytes();
    // At least one zero byte, and a multiple of four.
    name.push(0);
    name.resize(name.len().next_multiple_of(4).max(20), 0);
    let length = u16::try_from(name.len()).unwrap_or(u16::MAX);
    let [high, low] = length.to_be_bytes();
    let mut id = vec![0x45, 0, high, low];
    id.append(&mut name);
    id.into_boxed_slice()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transport_ids_are_padded() {
        let id = transport_id(&"iqn.2026-01.org.example:a".parse().unwrap(), [0x80, 1, 2, 3, 4, 5]);
        assert_eq!(id[..4], [0x45, 0, 0, 44]);
        assert_eq!(&id[4..], b"iqn.2026-01.org.example:a,i,0x800102030405\0\0");
        assert_eq!(id.len() % 4, 0);
    }
}
