//! The hardware address of a network card.

/// The 6-byte hardware address of a network card.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// The address with `-` between its bytes, as in URLs.
    pub fn dashed(self) -> String {
        self.to_string().replace(':', "-")
    }
}

impl std::fmt::Display for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl std::fmt::Debug for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self}")
    }
}

impl std::str::FromStr for Mac {
    type Err = String;

    /// Six pairs of hexadecimal digits with `:` or `-` between them.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            || format!("'{}' is not a hardware address, such as 52:54:00:12:34:56", text.escape_debug());
        let separator = if text.contains('-') { '-' } else { ':' };
        let mut bytes = [0; 6];
        let mut pairs = text.split(separator);
        for byte in &mut bytes {
            let pair =
                pairs.next().filter(|pair| pair.len() == 2 && pair.bytes().all(|b| b.is_ascii_hexdigit()));
            *byte = u8::from_str_radix(pair.ok_or_else(wrong)?, 16).map_err(|_| wrong())?;
        }
        match (pairs.next(), bytes) {
            (Some(_), _) => Err(wrong()),
            // The lowest bit of the first byte marks a multicast address.
            (None, [first, ..]) if first & 1 == 1 || bytes == [0; 6] => Err(format!(
                "{} is a group address or zero, not the address of one network card",
                Self(bytes)
            )),
            (None, bytes) => Ok(Self(bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_mean_the_same_card() {
        let mac: Mac = "52:54:00:AB:cd:0e".parse().unwrap();
        assert_eq!(mac.to_string(), "52:54:00:ab:cd:0e");
        assert_eq!(mac.dashed().parse(), Ok(mac));
    }

    #[test]
    fn an_address_that_no_single_card_has_is_refused() {
        for wrong in
            ["", "52:54:00:ab:cd", "52:54:00:ab:cd:0e:01", "52:54:00:ab:cd:+e", "5254.00ab.cd0e", "x"]
        {
            assert!(wrong.parse::<Mac>().unwrap_err().contains("not a hardware address"), "{wrong}");
        }
        for group in ["ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01", "00:00:00:00:00:00"] {
            assert!(group.parse::<Mac>().unwrap_err().contains("one network card"), "{group}");
        }
    }
}
