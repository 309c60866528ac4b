//! The report of a `diff`: one HTML file with its pictures inside, readable in light and in dark.

use super::diff::{Pair, Section};
use megamoe::diff::{Comparison, LOWEST, UlpHistogram};
use megamoe::{Error, Result};
use plotters::prelude::*;
use std::fmt::{Display, Write};
use std::path::Path;

/// Stands for the colour of the text, which depends on the reader's scheme: replaced in the finished picture.
const INK: RGBColor = RGBColor(1, 2, 3);
const INK_TEXT: &str = "#010203";
/// Stands for the colour of the bars.
const BAR: RGBColor = RGBColor(3, 2, 1);
const BAR_TEXT: &str = "#030201";

const STYLE: &str = "
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1e21; --soft: #6a7076; --line: #d8dce0; --good: #1a7f37; --bad: #c62828;
  --bar: #2f6fb3; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e3e6ea; --soft: #98a0a8; --line: #363c43; --good: #56c271;
  --bad: #ff7b72; --bar: #6cb0f5; } }
body { font: 15px/1.5 system-ui, sans-serif; background: var(--paper); color: var(--ink); max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
code { font-family: ui-monospace, monospace; } .good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.verdict { font-size: 1.1rem; font-weight: 600; } .soft { color: var(--soft); }
figure { margin: 1rem 2rem 1rem 0; display: inline-block; max-width: 100%; } figcaption { color: var(--soft); }
svg { max-width: 100%; height: auto; color: var(--ink); }
";

/// Writes the report of `sections`. `about` are facts for its head: seed, devices and so on.
pub fn write(path: &Path, sections: &[Section], about: &[(String, String)]) -> Result<()> {
    std::fs::write(path, page(sections, about)).map_err(|source| Error::Io { path: path.to_path_buf(), source })
}

fn page(sections: &[Section], about: &[(String, String)]) -> String {
    let mut out = String::new();
    let agreed = sections.iter().all(Section::agrees);
    // Writing to a String cannot fail.
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>megamoe diff</title>\n<style>{STYLE}</style>\n<h1>megamoe diff</h1>\n{}",
        if agreed {
            "<p class=\"verdict good\">Every comparison agrees.</p>"
        } else {
            "<p class=\"verdict bad\">The back ends disagree.</p>"
        },
    );
    out.push_str("<table>");
    for (key, value) in about {
        let _ = write!(out, "<tr><th>{}</th><td>{}</td></tr>", escape(key), escape(value));
    }
    out.push_str("</table>\n<h2>Summary</h2>\n<div class=\"scroll\"><table><tr><th>operation</th><th>values</th><th>compared</th>\
                  <th>elements</th><th>different</th><th>wrong</th><th>largest difference</th><th>result</th></tr>\n");
    for section in sections {
        summary(&mut out, section);
    }
    out.push_str("</table></div>\n");
    for section in sections {
        details(&mut out, section);
    }
    out.push_str("</html>\n");
    out
}

fn summary(out: &mut String, section: &Section) {
    for Pair { reference, backend, comparison } in &section.comparisons {
        let (class, verdict) = match (comparison.agrees(), comparison.bounded) {
            (true, false) => ("good", "equal bits"),
            (true, true) => ("good", "within the bound"),
            (false, _) if comparison.wrong == 0 => ("bad", "status differs"),
            (false, _) => ("bad", "wrong"),
        };
        let _ = writeln!(
            out,
            "<tr><td><code>{}</code></td><td>{}</td><td>{} with {}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
             <td class=\"n\">{}</td><td class=\"n\">{:.3e}</td><td class=\"{class}\">{verdict}</td></tr>",
            section.op,
            escape(&section.source),
            escape(backend),
            escape(reference),
            comparison.elements,
            comparison.different,
            comparison.wrong,
            comparison.max_abs,
        );
    }
    for failure in &section.failures {
        let _ = writeln!(
            out,
            "<tr><td><code>{}</code></td><td>{}</td><td colspan=\"6\" class=\"bad\">{}</td></tr>",
            section.op,
            escape(&section.source),
            escape(failure)
        );
    }
}

fn details(out: &mut String, section: &Section) {
    let _ = write!(
        out,
        "<h2><code>{}</code></h2>\n<p>{}<br><span class=\"soft\">{}</span></p>\n",
        section.op,
        escape(&section.description),
        escape(&section.source)
    );
    for Pair { reference, backend, comparison } in &section.comparisons {
        let _ = writeln!(out, "<h3>{} with {}</h3>", escape(backend), escape(reference));
        if comparison.different == 0 {
            let _ = writeln!(out, "<p>All {} elements have equal bits.</p>", comparison.elements);
        }
        if let Some(first) = &comparison.first {
            let _ = writeln!(
                out,
                "<div class=\"scroll\"><table><tr><th>first mismatch</th><th>expected bits</th><th>bits</th><th>expected value</th>\
                 <th>value</th></tr><tr><td>{}</td><td><code>{}</code></td><td><code>{}</code></td><td class=\"n\">{}</td>\
                 <td class=\"n\">{}</td></tr></table></div>",
                escape(&first.place),
                first.expected,
                first.got,
                first.expected_value,
                first.got_value
            );
        }
        if comparison.status_differs {
            out.push_str("<p class=\"bad\">The status words differ.</p>\n");
        }
        if comparison.elements > 0 {
            figure(out, "Distance in units in the last place", &ulp_bars(comparison));
        }
        if comparison.different > 0 {
            figure(out, "Absolute difference of the elements that differ", &magnitude_bars(comparison));
        }
    }
    for path in &section.replays {
        let path = escape(path.display());
        let _ = writeln!(out, "<p>Again: <code>megamoe diff --op {} --case {path}</code></p>", section.op);
    }
}

fn ulp_bars(comparison: &Comparison) -> Vec<(String, usize)> {
    let mut bars: Vec<(String, usize)> = comparison
        .ulps
        .buckets
        .iter()
        .copied()
        .enumerate()
        .map(|(bucket, count)| (UlpHistogram::label(bucket), count))
        .collect();
    if comparison.ulps.nan > 0 {
        bars.push(("NaN".into(), comparison.ulps.nan));
    }
    bars
}

fn magnitude_bars(comparison: &Comparison) -> Vec<(String, usize)> {
    let counts = &comparison.magnitudes;
    let Some(first) = counts.iter().position(|count| *count > 0) else { return Vec::new() };
    let last = counts.iter().rposition(|count| *count > 0).unwrap_or(first);
    (first..=last).map(|i| (format!("2^{}", i as i32 + LOWEST), counts[i])).collect()
}

fn figure(out: &mut String, caption: &str, bars: &[(String, usize)]) {
    if bars.is_empty() {
        return;
    }
    // A picture is an extra: where it cannot be drawn, its numbers are given instead.
    let picture = draw(bars).unwrap_or_else(|_| {
        escape(bars.iter().map(|(label, count)| format!("{label}: {count}")).collect::<Vec<_>>().join(", "))
    });
    let _ = writeln!(out, "<figure>{picture}<figcaption>{}</figcaption></figure>", escape(caption));
}

/// A bar chart, counts on a logarithmic scale so that a single element among millions can be seen.
fn draw(bars: &[(String, usize)]) -> std::result::Result<String, Box<dyn std::error::Error>> {
    let mut svg = String::new();
    {
        let width = (140 + 44 * bars.len() as u32).clamp(320, 1000);
        let root = SVGBackend::with_string(&mut svg, (width, 240)).into_drawing_area();
        let most = bars.iter().map(|(_, count)| *count).max().unwrap_or(1).max(1) as f64;
        let mut chart = ChartBuilder::on(&root)
            .margin(8)
            .x_label_area_size(30)
            .y_label_area_size(64)
            .build_cartesian_2d((0..bars.len() - 1).into_segmented(), (0.5..most * 2.0).log_scale())?;
        let font = ("sans-serif", 12).into_font().color(&INK);
        chart
            .configure_mesh()
            .disable_x_mesh()
            .axis_style(INK)
            .bold_line_style(INK.mix(0.15))
            .light_line_style(INK.mix(0.0))
            .label_style(font)
            .x_labels(bars.len().min(20))
            .x_label_formatter(&|at| match at {
                SegmentValue::CenterOf(i) => bars.get(*i).map_or(String::new(), |(label, _)| label.clone()),
                _ => String::new(),
            })
            .y_label_formatter(&|count| format!("{count:.0}"))
            .draw()?;
        let bar = |(i, (_, count)): (usize, &(String, usize))| {
            let corners = [(SegmentValue::Exact(i), 0.5), (SegmentValue::Exact(i + 1), *count as f64)];
            let mut bar = Rectangle::new(corners, BAR.filled());
            bar.set_margin(0, 0, 4, 4);
            bar
        };
        chart.draw_series(bars.iter().enumerate().filter(|(_, (_, count))| *count > 0).map(bar))?;
        root.present()?;
    }
    Ok(svg.replace(INK_TEXT, "currentColor").replace(BAR_TEXT, "var(--bar)"))
}

fn escape(text: impl Display) -> String {
    let text = text.to_string();
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;
    use megamoe::diff::{Op, OpCase, Output};

    #[test]
    fn pages_show_verdict_mismatch_and_pictures() {
        let expected = OpCase::Exp { x: vec![0.0, 1.0, 2.0] }.on_cpu().unwrap();
        let got = Output { bits: expected.bits.iter().map(|bits| bits ^ 4).collect(), ..expected.clone() };
        let section = |got: &Output| Section {
            op: Op::Exp,
            source: "<by hand>".into(),
            description: "3 elements".into(),
            comparisons: vec![Pair {
                reference: "cpu".into(),
                backend: "emulator".into(),
                comparison: Comparison::of(&expected, got, None),
            }],
            failures: Vec::new(),
            replays: Vec::new(),
        };
        let bad = page(&[section(&got)], &[("Seed".into(), "1".into())]);
        for needed in ["The back ends disagree", "0x3f800000", "0x3f800004", "<svg", "var(--bar)", "&lt;by hand&gt;"] {
            assert!(bad.contains(needed), "{needed}");
        }
        assert!(!bad.contains(INK_TEXT) && !bad.contains("http:"), "self-contained, in the reader's colours");
        let good = page(&[section(&expected)], &[]);
        assert!(good.contains("All 3 elements have equal bits") && !good.contains("The back ends disagree"));
    }
}
