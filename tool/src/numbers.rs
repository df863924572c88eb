//! Numbers for people: sizes and times, alike in every table, line and picture.

/// A number with its thousands separated.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A number of bytes in at most seven characters: "64K", as on a command line, if that is exact; "70,064"; "1.5M".
pub fn bytes(number: u64) -> String {
    const UNITS: [&str; 6] = ["K", "M", "G", "T", "P", "E"];
    let unit = |power: usize| 1u64 << (10 * power);
    let largest = (1..=UNITS.len()).rev().find(|power| number >= unit(*power));
    match largest {
        Some(power) if number.is_multiple_of(unit(power)) => {
            format!("{}{}", number / unit(power), UNITS[power - 1])
        }
        Some(power) if number >= 1_000_000 => {
            format!("{:.1}{}", number as f64 / unit(power) as f64, UNITS[power - 1])
        }
        _ => grouped(number),
    }
}

/// A time: "12.3us", "1.5ms", "137.0s"; "-" for none.
pub fn time(nanos: Option<u64>) -> String {
    let Some(nanos) = nanos else { return "-".to_owned() };
    let (unit, name) = match nanos {
        0..1_000_000 => (1_000, "us"),
        1_000_000..1_000_000_000 => (1_000_000, "ms"),
        _ => (1_000_000_000, "s"),
    };
    format!("{:.1}{name}", nanos as f64 / unit as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_at_a_glance() {
        assert_eq!([0, 7, 999, 1000, 1234567].map(grouped), ["0", "7", "999", "1,000", "1,234,567"]);
        let some = [0, 1023, 1024, 4096, 70064, 999_999, 3 << 19, 16 << 20, 1_000_001];
        assert_eq!(some.map(bytes), ["0", "1,023", "1K", "4K", "70,064", "999,999", "1.5M", "16M", "976.6K"]);
        assert_eq!(bytes(u64::MAX), "16.0E");
        let times = [None, Some(900), Some(1_500_000), Some(137_000_000_000)];
        assert_eq!(times.map(time), ["-", "0.9us", "1.5ms", "137.0s"]);
    }

    #[test]
    fn bytes_fit_their_columns() {
        for shift in 0..64 {
            for near in [1u64 << shift, (1 << shift) - 1, (1u64 << shift) + 1, u64::MAX >> shift] {
                assert!(bytes(near).len() <= 7, "{near}: {}", bytes(near));
            }
        }
    }
}
