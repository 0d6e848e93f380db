//! Parses and prints sizes as people write them: `64M`, `10G`, `512`, with binary units.

/// Parses a size in bytes: a whole number with an optional binary unit `K`, `M`, `G` or `T` (also `KiB`
/// and so on; upper or lower case).
pub fn parse(text: &str) -> Result<u64, String> {
    let trimmed = text.trim();
    let digits = trimmed.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = trimmed.split_at(digits);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        _ => return Err(format!("'{text}' is not a size; write for instance 512M, 10G or 4096")),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| format!("'{text}' is not a size; write for instance 512M, 10G or 4096"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("the size '{text}' does not fit in 64 bits"))
}

/// Prints a size with one decimal and a binary unit: `1.5 GiB`.
pub fn format(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut tenths = u128::from(bytes) * 10 / 1024;
    let mut unit = "KiB";
    for next in UNITS.iter().skip(1) {
        if tenths < 10_240 {
            break;
        }
        tenths /= 1024;
        unit = next;
    }
    format!("{}.{} {unit}", tenths / 10, tenths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_parsed_with_binary_units() {
        assert_eq!(parse("64M"), Ok(64 << 20));
        assert_eq!(parse("10GiB"), Ok(10 << 30));
        assert_eq!(parse("4096"), Ok(4096));
        for bad in ["", "M", "1X", "1.5G", "-1", "99999999999T"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_are_printed_for_people() {
        assert_eq!(format(0), "0 B");
        assert_eq!(format(1023), "1023 B");
        assert_eq!(format(1536), "1.5 KiB");
        assert_eq!(format(10 << 30), "10.0 GiB");
    }
}
