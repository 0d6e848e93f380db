//! IPv4 addresses of network interfaces, from the C library's `getifaddrs`: no safe library in this project offers
//! them.
#![expect(unsafe_code, reason = "getifaddrs gives a list of pointers")]

use std::ffi::CStr;
use std::io;
use std::net::Ipv4Addr;
use std::ptr;

/// The first IPv4 address of an interface.
pub(crate) fn of(interface: &str) -> io::Result<Option<Ipv4Addr>> {
    let mut list: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: the call writes a pointer to `list` and nothing else.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = None;
    let mut at = list;
    // SAFETY: a pointer of the list is null or points to an entry, until the list is freed below.
    while let Some(entry) = unsafe { at.as_ref() } {
        // SAFETY: each entry has a name that ends with a zero.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        if found.is_none() && name.to_bytes() == interface.as_bytes() {
            found = ipv4(entry.ifa_addr);
        }
        at = entry.ifa_next;
    }
    // SAFETY: the list came from getifaddrs, and no pointer into it is used any more.
    unsafe { libc::freeifaddrs(list) };
    Ok(found)
}

fn ipv4(address: *const libc::sockaddr) -> Option<Ipv4Addr> {
    // SAFETY: the pointer is null (an interface without an address), or points to an address of some family.
    let family = unsafe { address.as_ref() }?.sa_family;
    if i32::from(family) != libc::AF_INET {
        return None;
    }
    // SAFETY: an address of this family is a `sockaddr_in`; it may be unaligned, so it is copied.
    let address = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
    Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_has_its_address_and_a_missing_one_has_none() {
        assert_eq!(of("lo").unwrap(), Some(Ipv4Addr::LOCALHOST));
        assert_eq!(of("no-such-one").unwrap(), None);
    }
}
